#!/usr/bin/env bash
# run_complete.sh import|1|2 [-- ARGUMENTS]: unpack what pack_run.sh made, and check it or run it. Tables go to $OUT, or to .gpu/results.
#   import  both packs, on a CPU: all modules are imported, and no symbol of torch is missing
#   1       the first pack on a GPU: symbols, kernels, NCCL
#   2       the second pack on the same GPU: imports, then the complete run; ARGUMENTS are those of benchmarks.gpu.run_rl
set -uo pipefail
cd "$(dirname "$0")/../.."
usage() { echo "usage: $0 import|1|2 [-- ARGUMENTS]" >&2; exit 64; }
[ $# -ge 1 ] || usage
part=$1; shift
if [ "${1:-}" = -- ]; then shift; elif [ $# -gt 0 ]; then usage; fi

PYTHON=${PYTHON:-python3}
PACKS=${RLRUN_PACKS:-.gpu}
SITE=${SITE:-/tmp/rlrun-site}
RESULTS=${OUT:-.gpu/results}
mkdir -p "$SITE" "$RESULTS"
SITE=$(cd "$SITE" && pwd) RESULTS=$(cd "$RESULTS" && pwd)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# The GPU's driver compiles PTX at first use, and Triton its kernels: both stay for the next part.
export CUDA_CACHE_PATH=$SITE/../rlrun-cache/cuda TRITON_CACHE_DIR=$SITE/../rlrun-cache/triton TORCHINDUCTOR_CACHE_DIR=$SITE/../rlrun-cache/inductor
export VLLM_CACHE_ROOT=$SITE/../rlrun-cache/vllm VLLM_USE_FLASHINFER_SAMPLER=0
code=0

# The next upload deletes the files of this one from the checkout, so everything is unpacked into another folder.
unpack() {
  PYTHONPATH=. "$PYTHON" -m benchmarks.gpu.pack_run check "$PACKS/$1" --site "$SITE" || exit 1
  if compgen -G "$PACKS/$1/*.whl" >/dev/null; then
    "$PYTHON" -m pip --version >/dev/null 2>&1 && installer=("$PYTHON" -m pip install --no-compile --no-cache-dir) ||
      installer=("${UV:-uv}" pip install --python "$PYTHON")
    "${installer[@]}" --quiet --no-index --no-deps --target "$SITE" "$PACKS/$1"/*.whl || exit 1
  fi
}
run() { PYTHONPATH=$SITE:.${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -m "$@" 2>&1 | tee -a "$RESULTS/complete.txt" || code=1; }

case $part in
  import)
    unpack run1 && unpack run2
    run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS"
    ;;
  1)
    unpack run1
    run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS" --gpu
    PYTHONPATH=workloads run benchmarks.gpu.run_rl --results "$RESULTS" --only nccl
    ;;
  2)
    [ -d "$SITE/vllm" ] || { echo "error: $SITE has no vllm: run \`$0 1\` first, on the same machine" >&2; exit 1; }
    unpack run2
    run benchmarks.gpu.check_pack --site "$SITE" --results "$RESULTS"
    run benchmarks.gpu.run_rl --results "$RESULTS" "$@"
    ;;
  *) usage ;;
esac
exit $code
