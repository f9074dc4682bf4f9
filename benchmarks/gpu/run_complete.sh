#!/usr/bin/env bash
# run_complete.sh import|1|2 [--dry] [-- ARGUMENTS]: unpack what pack_run.sh made, and check it or run it. Tables go to $OUT, or to .gpu/results.
#   import  both packs, on a CPU: all modules are imported, and no symbol of torch is missing
#   1       the first pack on a GPU: symbols, kernels, NCCL; at most 110 s
#   2       the second pack on the same GPU: imports, then the complete run; at most 545 s; ARGUMENTS are those of benchmarks.gpu.run_rl
# --dry: the same on a CPU, with gloo, tiny sizes and ten times the time. Its engine is the vLLM of DRY_PYTHON (default .venv/bin/python).
set -uo pipefail
cd "$(dirname "$0")/../.."
usage() { echo "usage: $0 import|1|2 [--dry] [-- ARGUMENTS]" >&2; exit 64; }
[ $# -ge 1 ] || usage
part=$1; shift
dry=() slack=1
if [ "${1:-}" = --dry ]; then dry=(--dry) slack=10; shift; fi
if [ "${1:-}" = -- ]; then shift; elif [ $# -gt 0 ]; then usage; fi

PYTHON=${PYTHON:-python3}
PACKS=${RLRUN_PACKS:-.gpu}
SITE=${SITE:-/tmp/rlrun-site}
RESULTS=${OUT:-.gpu/results}
mkdir -p "$SITE" "$RESULTS" || { echo "error: $SITE or $RESULTS cannot be written; set SITE and OUT to other folders" >&2; exit 1; }
SITE=$(cd "$SITE" && pwd) RESULTS=$(cd "$RESULTS" && pwd)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# The GPU's driver compiles PTX at first use, and Triton its kernels: both stay for the next part.
CACHE=$(dirname "$SITE")/rlrun-cache
export CUDA_CACHE_PATH=$CACHE/cuda TRITON_CACHE_DIR=$CACHE/triton TORCHINDUCTOR_CACHE_DIR=$CACHE/inductor
export VLLM_CACHE_ROOT=$CACHE/vllm VLLM_USE_FLASHINFER_SAMPLER=0
# Below the limits of the caller (120 and 560 s), so that this script ends by itself with its tables written.
case $part in 1) LIMIT=${LIMIT:-110} ;; 2) LIMIT=${LIMIT:-545} ;; *) LIMIT=${LIMIT:-1800} ;; esac
LIMIT=$((LIMIT * slack))
code=0

left() { echo $((LIMIT - SECONDS)); }
note() { echo "$1" | tee -a "$RESULTS/complete.txt" >&2; }
# limited COMMAND...: run it in the rest of the time. Its output is not a pipe of this script: a process that it leaves behind delays nothing.
limited() {
  local rest status=0; rest=$(left)
  if [ "$rest" -le 5 ]; then note "error: not run, the $LIMIT s of this call are over: $*"; return 1; fi
  timeout --kill-after=10 "$rest" "$@" > >(tee -a "$RESULTS/complete.txt") 2>&1 || status=$?
  case $status in
    0) ;;
    124 | 137) note "error: stopped, the $LIMIT s of this call are over: $*" ;;
    *) note "error: exit code $status: $*" ;;
  esac
  return "$status"
}
run() { PYTHONPATH=$SITE:.${PYTHONPATH:+:$PYTHONPATH} limited "$PYTHON" -m "$@" || code=1; }

# The next upload deletes the files of this one from the checkout, so everything is unpacked into another folder. The sums are
# copied last: they show that the pack is complete there.
unpack() {
  rm -f "$SITE/$1.SHA256SUMS"
  PYTHONPATH=. limited "$PYTHON" -m benchmarks.gpu.pack_run check "$PACKS/$1" --site "$SITE" || exit 1
  if compgen -G "$PACKS/$1/*.whl" >/dev/null; then
    "$PYTHON" -m pip --version >/dev/null 2>&1 && installer=("$PYTHON" -m pip install --no-compile --no-cache-dir --disable-pip-version-check) ||
      installer=("${UV:-uv}" pip install --python "$PYTHON")
    limited "${installer[@]}" --quiet --upgrade --no-index --no-deps --target "$SITE" "$PACKS/$1"/*.whl || exit 1
  fi
  cp "$PACKS/$1/SHA256SUMS" "$SITE/$1.SHA256SUMS"
  note "unpacked $PACKS/$1 after $SECONDS s"
}
# By the driver's library, because an import of torch takes seconds.
check_gpu() {
  [ -z "${dry[*]}" ] || return 0
  "$PYTHON" -c 'import ctypes, sys; sys.exit(ctypes.CDLL("libcuda.so.1").cuInit(0))' 2>/dev/null ||
    { note "error: the CUDA driver finds no GPU (exit code $? of cuInit); use a machine with a GPU and its driver, or --dry"; exit 1; }
}
# rl ARGUMENTS...: the complete run. A dry one has an engine for CPUs, which the packs do not contain.
rl() {
  local seconds; seconds=$(($(left) - 10))
  if [ -n "${dry[*]}" ]; then
    PYTHONPATH=. limited "${DRY_PYTHON:-.venv/bin/python}" -m benchmarks.gpu.run_rl --dry --results "$RESULTS" --seconds "$seconds" "$@" || code=1
  else
    run benchmarks.gpu.run_rl --results "$RESULTS" --site "$SITE" --seconds "$seconds" "$@"
  fi
}

case $part in
  import)
    unpack run1 && unpack run2
    run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS"
    ;;
  1)
    check_gpu
    unpack run1
    if [ -n "${dry[*]}" ]; then
      run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS" --symbols
    else
      PYTHONPATH=workloads run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS" --gpu
    fi
    PYTHONPATH=workloads rl --only nccl
    ;;
  2)
    [ -f "$SITE/run1.SHA256SUMS" ] ||
      { note "error: $SITE does not have the first pack; run \`$0 1\` first, on the same machine, and do not interrupt it"; exit 1; }
    check_gpu
    unpack run2
    run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS"
    rl "$@"
    ;;
  *) usage ;;
esac
note "call $part ended after $SECONDS of $LIMIT s, exit code $code"
exit $code
