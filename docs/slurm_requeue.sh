#!/bin/bash
#SBATCH --job-name=recipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# A run that resumes by itself: sbatch docs/slurm_requeue.sh CONFIG OUTPUT_DIR [HARDWARE [RECIPE]]. See docs/preemption.md.
set -u
config=$1 output_dir=$2 hardware=${3:-ddp} recipe=${4:-}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300

mkdir -p "$output_dir"
rm -f "$output_dir/STOP"
written() { stat -c %y "$output_dir/run.json" 2>/dev/null; }
before=$(written)
stop() { touch "$output_dir/STOP"; }
# A cancelled job stays cancelled; SIGTERM after SIGUSR1 is the time limit.
signal=
trap 'signal=${signal:-USR1}; stop' USR1
trap 'signal=${signal:-TERM}; stop' TERM

# One launcher a node; it starts a process for each of the node's GPUs, laid out by accelerate_configs/$hardware.yaml.
srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpu-bind=none recipes launch ${recipe:+--recipe "$recipe"} \
    --config "$config" --hardware "$hardware" --output_dir "$output_dir" &
job=$!
# A signal interrupts `wait`, not the job.
wait "$job"
while kill -0 "$job" 2>/dev/null; do wait "$job"; done
wait "$job"
code=$?

# The status that the run has recorded decides, not the exit code of srun. An unchanged record is of an earlier job.
if [ "$signal" != TERM ] && [ "$(written)" != "$before" ] && grep -qE '"status": "(preempted|stalled)"' "$output_dir/run.json"; then
    scontrol requeue "$SLURM_JOB_ID"
    code=$?
fi
# The exit code that the queue shows, and that dependent jobs wait for.
exit "$code"
