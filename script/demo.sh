#!/usr/bin/env bash
# Train a tiny DM0.5 from random weights on the shipped demonstrations, two processes under FSDP1,
# in full float32, and judge it on episodes that it has not seen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

steps="${DEMO_STEPS:-400}"
output=user_checkpoints/demo
opendm=.venv/bin/opendm

echo "== 1/3 a tiny checkpoint with random weights: checkpoints/tiny"
[ -f checkpoints/tiny/config.json ] || "$opendm" tiny-checkpoint --output checkpoints/tiny

echo "== 2/3 training, $steps steps: $output"
rm -rf "$output"
script/dm05_launcher.sh --nproc_per_node 2 --exp playground/dm05_sft_demo.py \
  --model-config.model-name-or-path checkpoints/tiny \
  --model-config.no-bf16 --trainer-config.no-bf16 \
  --model-config.no-vlm-gradient-checkpointing --model-config.no-ae-gradient-checkpointing \
  --optimizer-config.base-lr 1e-3 --optimizer-config.warmup-steps 40 --optimizer-config.weight-decay 0.01 \
  --trainer-config.output-dir "$output" \
  --trainer-config.num-train-steps "$steps" --trainer-config.save-steps 200 \
  --trainer-config.per-device-train-batch-size 16 \
  --trainer-config.dataloader-num-workers 1

echo "== 3/3 evaluation on held-out episodes"
"$opendm" eval open-loop --checkpoint "$output" --untrained checkpoints/tiny \
  --dataset-name demo_heldout --output "$output"
echo "report: $output/report.html"
