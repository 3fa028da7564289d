#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ num_nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={% if gpu %}{{ gpu }}:{% endif %}{{ gpus_per_node }}
#SBATCH --time={{ hours }}:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
{# Without either, SLURM gives a task one core and the memory of one core. #}
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
: "${{ "{" }}{{ secret }}:?set it before sbatch, which passes it to the job}"
{% endfor %}
{% if output_dir %}
output_dir={{ output_dir | quote }}
{% endif %}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300

{% if output_dir %}
mkdir -p "$output_dir"
rm -f "$output_dir/STOP"
written() { stat -c %y "$output_dir/run.json" 2>/dev/null; }
before=$(written)
stop() { touch "$output_dir/STOP"; }
{% else %}
# `recipes run` passes it on to its stage.
stop() { kill -TERM $(jobs -p); }
{% endif %}
# A cancelled job stays cancelled; SIGTERM after SIGUSR1 is the time limit.
signal=
trap 'signal=${signal:-USR1}; stop' USR1
trap 'signal=${signal:-TERM}; stop' TERM

{{ (starter + command) | join_words }} &
job=$!
# A signal interrupts `wait`, not the job.
wait "$job"
while kill -0 "$job" 2>/dev/null; do wait "$job"; done
wait "$job"
code=$?

{% if output_dir %}
# The status that the run has recorded decides, not the exit code of srun. An unchanged record is of an earlier job.
if [ "$signal" != TERM ] && [ "$(written)" != "$before" ] && grep -qE '{{ resumable }}' "$output_dir/run.json"; then
{% else %}
if [ "$signal" != TERM ] && { [ "$code" = {{ exit_preempted }} ] || [ "$code" = {{ exit_stalled }} ]; }; then
{% endif %}
    scontrol requeue "$SLURM_JOB_ID"
    code=$?
fi
# The exit code that the queue shows, and that dependent jobs wait for.
exit "$code"
