#!/usr/bin/env bash
#SBATCH --job-name=pods
#SBATCH --array=0-41               # one task for each arm and seed: 3 arms x 14 seeds
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --time=02:00:00
#SBATCH --signal=B:TERM@300        # B: to this process, which becomes pods: five minutes before the end it saves and stops
#SBATCH --requeue                  # after a preemption the same task continues from it
#
# `pods compare` over the nodes of a Slurm cluster: each task of a job array makes one run in the experiment's directory,
# and `pods compare` then finds them finished and writes the report. Two calls of `pods compare` on one directory are
# refused; runs of different directories share nothing, so any number of nodes may work on them.
#
#   job=$(sbatch --parsable examples/slurm.sh)
#   sbatch --dependency=afterany:$job --wrap 'pods compare quickstart --output runs/quickstart'
#
# Needs: pods-rl on every node, and a file system that they share. The second job makes what failed again.
# Without Slurm: for task in $(seq 0 41); do SLURM_ARRAY_TASK_ID=$task examples/slurm.sh; done
set -euo pipefail

EXPERIMENT=${EXPERIMENT:-quickstart}  # a shipped experiment
ARMS=(grpo-trl pods grpo)             # its arms: `pods recipes quickstart`
SEEDS=(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
OUTPUT=${OUTPUT:-runs/$EXPERIMENT}

arm=${ARMS[SLURM_ARRAY_TASK_ID % ${#ARMS[@]}]}
seed=${SEEDS[SLURM_ARRAY_TASK_ID / ${#ARMS[@]}]}
run=$OUTPUT/$arm/seed-$seed
mkdir -p "$run"
resume=()
if [ -e "$run/status.json" ]; then resume=(--resume); fi
exec pods train "$EXPERIMENT-$arm" --seed "$seed" --output "$run" "${resume[@]}" "$@"
