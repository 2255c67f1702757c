#!/usr/bin/env bash
# The demonstration of script/demo_sim.sh with three training seeds, and what each must reach.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=user_checkpoints/bench_sim
for seed in 1 2 3; do
  echo "== seed $seed"
  SIM_SEED=$seed SIM_OUTPUT="$folder/seed$seed" bash script/demo_sim.sh
done
.venv/bin/python benchmarks/training/sim_criteria.py "$folder"/seed*/metaworld.json
