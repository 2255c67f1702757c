#!/usr/bin/env bash
# Close the loop in a simulator: record 100 scripted demonstrations of a button press whose start
# varies widely, train a small DM0.5 from random weights on them, and let it act on 100 starts that
# nobody has seen, beside controls that show what it owes to its eyes. SIM_SET=five does so with one
# policy for five tasks, three of which share their scene.
# SIM_SEED, SIM_STEPS, SIM_EPISODES and SIM_OUTPUT change what is set below; arguments
# are further flags of the training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${SIM_SET:-one}" in
  one)
    dataset=metaworld start=sim output=demo_sim steps=1800 episodes=100 counts=(100)
    tasks=(button-press-topdown-v3)
    ;;
  five)
    dataset=metaworld_five start=sim-five output=demo_sim_five steps=16000 episodes=50
    counts=(100 60 120 120 120)
    tasks=(button-press-topdown-v3 drawer-open-v3 alike-reach-v3 alike-push-v3 alike-pick-place-v3)
    ;;
  *)
    echo "SIM_SET is '$SIM_SET'; allowed: one, five" >&2
    exit 2
    ;;
esac
seed="${SIM_SEED:-42}"
steps="${SIM_STEPS:-$steps}"
episodes="${SIM_EPISODES:-$episodes}"
data="data/$dataset"
start="checkpoints/$start-$seed"
output="${SIM_OUTPUT:-user_checkpoints/$output}"
opendm=.venv/bin/opendm

echo "== 1/4 demonstrations, ${counts[*]} of ${tasks[*]}: $data"
OMP_NUM_THREADS=1 .venv/bin/python playground/collect_metaworld.py \
  --output "$data" --tasks "${tasks[@]}" --episodes-per-task "${counts[@]}" --heldout-per-task 0 \
  --image-size 96 --jpeg-quality 90 --processes 2 --keep --overwrite

echo "== 2/4 a small checkpoint with random weights: $start"
"$opendm" tiny-checkpoint --size sim --dataset-name "$dataset" --seed "$seed" --output "$start"

echo "== 3/4 training, $steps steps: $output"
script/dm05_launcher.sh --nproc_per_node 2 --exp playground/dm05_metaworld.py \
  --data-config.dataset-name "$dataset" \
  --model-config.model-name-or-path "$start" --trainer-config.output-dir "$output" \
  --trainer-config.num-train-steps "$steps" --trainer-config.save-steps $(((steps + 7) / 8)) \
  --trainer-config.per-device-train-batch-size 8 --trainer-config.no-fsdp1 \
  --trainer-config.seed "$seed" --trainer-config.overwrite "$@"

echo "== 4/4 $episodes unseen starts, with controls"
"$opendm" eval metaworld --task "${tasks[@]}" --episodes "$episodes" --seed 50000 \
  --checkpoint "$output" --untrained "$start" --output "$output"
