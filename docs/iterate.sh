#!/usr/bin/env bash
# Rounds of RLHF: the policy answers prompts, its rewards label the answers, and DPO trains the policy that answered.
#
#   ROUNDS=3 OUT=runs/iterated bash docs/iterate.sh POLICY SAMPLING TRAINING
#
# POLICY: folder or Hub id of the first policy. SAMPLING: a recipe of PPO, which says prompts, rewards and sampling.
# TRAINING: a recipe of DPO. Stopped at any point, the same command goes on.
set -euo pipefail

policy=$1 sampling=$2 training=$3
recipes=$(cd "$(dirname "$0")/../recipes" && pwd)

for round in $(seq 1 "${ROUNDS:-2}"); do
    pairs="$OUT/pairs-$round.jsonl"
    # Another seed each round, so that the same prompts are answered anew.
    recipes sample-pairs --config "$sampling" --model_name_or_path "$policy" --seed "$round" \
        --output_dir "$OUT/unused" --output "$pairs"
    python "$recipes/dpo.py" --config "$training" --model_name_or_path "$policy" --dataset_name "$pairs" \
        --output_dir "$OUT/policy-$round"
    policy="$OUT/policy-$round"
done
echo "the policy of the last round: $policy"
