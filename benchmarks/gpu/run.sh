#!/usr/bin/env bash
# run.sh N [--dry]: one of three commands of at most 9.5 minutes. Tables go to $OUT, or to .gpu/results; caches stay in .gpu/cache.
# Behind --, arguments of the script that measures: run.sh 2 -- --only 'RL 16k, eager' --fields '{"attention": "sdpa"}'
set -uo pipefail
cd "$(dirname "$0")/../.."
usage() { echo "usage: $0 1|2|3 [--dry] [-- ARGUMENTS]" >&2; exit 64; }
[ $# -ge 1 ] || usage
number=$1; shift
dry=()
if [ "${1:-}" = --dry ]; then dry=(--dry); shift; fi
if [ "${1:-}" = -- ]; then shift; elif [ $# -gt 0 ]; then usage; fi

PYTHON=${PYTHON:-python3}
WORK=${GPU_WORK:-.gpu}
RESULTS=${OUT:-$WORK/results}
mkdir -p "$RESULTS" "$WORK/cache" "$WORK/results"
RESULTS=$(cd "$RESULTS" && pwd) WORK=$(cd "$WORK" && pwd)
export TORCHINDUCTOR_CACHE_DIR=$WORK/cache/inductor TRITON_CACHE_DIR=$WORK/cache/triton
export PYTHONPATH=$WORK/site:workloads:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 RLRUN_GPU_DRY=${#dry[@]}
slack=1
[ ${#dry[@]} -eq 0 ] || slack=10  # a busy CPU is no GPU
LIMIT=$((570 * slack))
began=$SECONDS
worst=0

left() { echo $((LIMIT - (SECONDS - began))); }
# Every part ends by itself; the outer limit is for one that does not. What fails does not keep the next part from running.
part() {
  local limit=$(($1 * slack)) code=0; shift
  local remaining; remaining=$(left)
  [ "$remaining" -lt "$limit" ] && limit=$remaining
  if [ "$limit" -le 5 ]; then echo "left out, no time: $*"; return; fi
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$RESULTS/log.txt" || code=${PIPESTATUS[0]}
  if [ "$code" -ne 0 ]; then echo "exit code $code: $*" | tee -a "$RESULTS/log.txt"; worst=1; fi
}
install() {
  if compgen -G "$WORK/wheels/*.whl" >/dev/null; then
    rm -rf "$WORK/site"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$WORK"/wheels/*.whl || exit 1
    if [ -e "$WORK/flash_attn_3.tar.xz" ]; then
      "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$WORK/flash_attn_3.tar.xz" "$WORK/site" || exit 1
    fi
  fi
  "$PYTHON" -c 'import importlib.util as u, loguru, pydantic; assert all(map(u.find_spec, ("torch", "transformers")))' || { echo "error: run benchmarks/gpu/pack.sh where there is a network, and bring .gpu/wheels" >&2; exit 1; }
}

case $number in
  1)
    install
    part 60 "$PYTHON" -m benchmarks.gpu.probe --results "$RESULTS" "${dry[@]}" --seconds $((50 * slack))
    part 320 "$PYTHON" -m benchmarks.gpu.kernels --results "$RESULTS" "${dry[@]}" --seconds $((300 * slack)) "$@"
    part 180 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider --import-mode=importlib
    ;;
  2)
    [ -d "$WORK/site" ] || install
    if [ ! -e "$RESULTS/steps.json" ] && [ -e "$WORK/results/steps.json" ]; then cp "$WORK/results/steps.json" "$RESULTS"; fi
    part 565 "$PYTHON" -m benchmarks.gpu.steps --results "$RESULTS" "${dry[@]}" --seconds $(($(left) - 20)) "$@"
    [ "$RESULTS" = "$WORK/results" ] || cp "$RESULTS"/steps.* "$WORK/results"
    ;;
  3)
    [ -d "$WORK/site" ] || install
    # What command 2 found: of this machine, or, where it was another one, what was committed.
    for known in "$WORK/results/steps.json" benchmarks/results/gpu/steps.json; do
      if [ ! -e "$RESULTS/steps.json" ] && [ -e "$known" ]; then cp "$known" "$RESULTS/steps.json"; fi
    done
    part 480 "$PYTHON" -m benchmarks.gpu.profile_step --results "$RESULTS" "${dry[@]}" --seconds $(($(left) - 100)) "$@"
    ;;
  *) usage ;;
esac
exit $worst
