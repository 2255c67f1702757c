#!/usr/bin/env bash
# Start an experiment: nproc_per_node ranks on every node for training, one process for inference.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: dm05_launcher.sh [launcher flags] [experiment flags] [-- experiment flags]

  --exp FILE            experiment; looked up here, then in the repository
                        (default: playground/dm05_sft_demo.py of the repository)
  --nproc_per_node N    ranks on this node (default 8)
  --nnodes N            nodes (default 1)
  --node_rank N         rank of this node (default 0)
  --master_addr HOST    address of node 0 (default 127.0.0.1)
  --master_port N       port on node 0 (default 29500; on one node a free one if that is busy)
  --help                this text (`-- --help`: the flags of the experiment)

--flag=value and dashes for underscores work too. Any other flag, and all after `--`, goes to the
experiment. OPENDM_PYTHON is the Python to use; OPENDM_SHUTDOWN_TIMEOUT_S (default 300) is the
time to save after SIGTERM or SIGINT. Exit code: the first failing rank's; 2 for wrong flags.
TEXT
}

fail() {
  echo "dm05_launcher.sh: $*; see --help" >&2
  exit 2
}

root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
exp="$root/playground/dm05_sft_demo.py"
nproc_per_node=8 nnodes=1 node_rank=0 master_addr=127.0.0.1 master_port=""
args=()
while (($#)); do
  flag="${1%%=*}"
  name="${flag#--}" && name="${name//-/_}"
  case "$flag:$name" in
    --:*) shift && args+=("$@") && break ;;
    --help:* | -h:*) usage && exit 0 ;;
    --*:exp | --*:nproc_per_node | --*:nnodes | --*:node_rank) ;;
    --*:master_addr | --*:master_port) ;;
    *) args+=("$1") && shift && continue ;;
  esac
  if [[ $1 == *=* ]]; then value="${1#*=}"; else shift && value="${1-}"; fi
  [[ -n $value && $value != --* ]] || fail "$flag needs a value"
  case "$name" in
    exp | master_addr) ;;
    node_rank) [[ $value =~ ^(0|[1-9][0-9]*)$ ]] || fail "$flag $value: give a number from 0" ;;
    *) [[ $value =~ ^[1-9][0-9]*$ ]] || fail "$flag $value: give a number from 1" ;;
  esac
  printf -v "$name" %s "$value" && shift
done
set -- ${args[@]+"${args[@]}"}

[[ -f $exp || $exp == /* ]] || exp="$root/$exp"
[[ -f $exp ]] || fail "--exp: no file ${exp#"$root"/}, neither in $PWD nor in $root"
python="${OPENDM_PYTHON:-}"
for candidate in "$root/.venv/bin/python" python3 python; do
  [[ -n $python ]] || python="$(command -v "$candidate" || true)"
done
[[ -n $python ]] || fail "no Python found; set OPENDM_PYTHON"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

previous=""
for arg; do
  case "$previous $arg" in
    "--task inference" | *" --task=inference" | *" --help") exec "$python" "$exp" "$@" ;;
  esac
  previous="$arg"
done

# Check the configuration once, here: a mistake is then reported once, and no rank starts.
OPENDM_VALIDATE_ONLY=1 "$python" "$exp" "$@" &
check=$!
trap 'kill "$check" 2>/dev/null || true; wait "$check" || true; exit 143' TERM HUP
trap 'kill "$check" 2>/dev/null || true; wait "$check" || true; exit 130' INT
wait "$check" || exit $?
trap - TERM HUP INT

# A hung collective ends the run after the process group's timeout instead of blocking for ever.
# (TORCH_NCCL_BLOCKING_WAIT does so too, but makes the CPU wait for every collective.)
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-24}"
threads=$(($(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) / nproc_per_node))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads < 1 ? 1 : threads > 4 ? 4 : threads))}"
exec "$python" -m opendm.launch --nproc_per_node "$nproc_per_node" --nnodes "$nnodes" \
  --node_rank "$node_rank" --master_addr "$master_addr" \
  ${master_port:+--master_port "$master_port"} "$exp" "$@"
