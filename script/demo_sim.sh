#!/usr/bin/env bash
# Close the loop in a simulator: record 100 scripted demonstrations of a button press whose start
# varies widely, train a small DM0.5 from random weights on them, and let it act on 100 starts that
# nobody has seen, beside controls that show what it owes to its eyes.
# SIM_SEED, SIM_STEPS, SIM_EPISODES and SIM_OUTPUT change what is set below; arguments
# are further flags of the training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed="${SIM_SEED:-42}"
steps="${SIM_STEPS:-2400}"
episodes="${SIM_EPISODES:-100}"
task=button-press-topdown-v3
data=data/metaworld
start="checkpoints/sim-$seed"
output="${SIM_OUTPUT:-user_checkpoints/demo_sim}"
opendm=.venv/bin/opendm

echo "== 1/4 100 demonstrations of $task: $data"
[ -f "$data/seeds.json" ] || OMP_NUM_THREADS=1 .venv/bin/python playground/collect_metaworld.py \
  --output "$data" --tasks "$task" --episodes-per-task 100 --heldout-per-task 0 \
  --image-size 96 --jpeg-quality 90 --processes 2 --overwrite

echo "== 2/4 a small checkpoint with random weights: $start"
"$opendm" tiny-checkpoint --size sim --dataset-name metaworld --seed "$seed" --output "$start"

echo "== 3/4 training, $steps steps: $output"
rm -rf "$output"
script/dm05_launcher.sh --nproc_per_node 2 --exp playground/dm05_metaworld.py \
  --model-config.model-name-or-path "$start" --trainer-config.output-dir "$output" \
  --trainer-config.num-train-steps "$steps" --trainer-config.save-steps $((steps / 4)) \
  --trainer-config.per-device-train-batch-size 8 --trainer-config.no-fsdp1 \
  --trainer-config.seed "$seed" "$@"

echo "== 4/4 $episodes unseen starts, with controls"
"$opendm" eval metaworld --task "$task" --episodes "$episodes" --seed 50000 \
  --checkpoint "$output" --untrained "$start" --output "$output"
