#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ num_nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={% if gpu %}{{ gpu }}:{% endif %}{{ gpus_per_node }}
#SBATCH --time={{ hours }}:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
{# Without either a task gets one core, and the memory of one. #}
{% if cpus_per_gpu is none %}
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --exclusive
{% else %}
#SBATCH --cpus-per-gpu={{ cpus_per_gpu }}
#SBATCH --requeue
{% endif %}
# Start it in the project's folder, with the environment active: sbatch {{ name }}.sh
set -u
{% for secret in secrets %}
: "${{ "{" }}{{ secret }}:?set it before sbatch, which hands it on}"
{% endfor %}
output_dir={{ output_dir | quote }}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300

mkdir -p "$output_dir"
rm -f "$output_dir/STOP"
began=$(mktemp)
trap 'touch "$output_dir/STOP"' USR1 TERM

{{ (starter + command) | join_words }} &
job=$!
# A signal ends `wait`, not what it waits for.
wait "$job"
while kill -0 "$job" 2>/dev/null; do wait "$job"; done
wait "$job"
code=$?

# Whatever srun reports: what the run has said of its own end since then decides.
if [ "$output_dir/run.json" -nt "$began" ] && grep -qE '{{ resumable }}' "$output_dir/run.json"; then
    scontrol requeue "$SLURM_JOB_ID"
    code=$?
fi
# What the queue shows, and what jobs that depend on this one wait for.
exit "$code"
