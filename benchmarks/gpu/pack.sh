#!/usr/bin/env bash
# Fill .gpu with what a machine with torch, transformers and numpy, but without a network, lacks: wheels of Python 3.12 on x86-64 (the trainer's
# and TRL's) and FlashAttention 3. Together they stay below 60 MB.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=.gpu/wheels
LIMIT=60000000
mkdir -p "$FOLDER"
find "$FOLDER" -name '*.whl' -delete
# --no-deps: one version of each, and nothing that is there already. pydantic names the pydantic_core that it needs.
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
fetch() {
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$FOLDER" "$@"
}
pin() { grep -oiE "^$1==[^ ]+" requirements/cpu.txt; }
fetch "$(pin pydantic)" "$(pin pydantic-core)" "$(pin annotated-types)" "$(pin typing-inspection)" "$(pin loguru)"
fetch trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
if [ ! -e .gpu/flash_attn_3.tar.xz ]; then
  large=$(mktemp -d)
  trap 'rm -rf "$large"' EXIT
  FOLDER=$large fetch xformers==0.0.34 nvidia-cuda-runtime-cu12==12.9.79
  "$PYTHON" -m benchmarks.gpu.pack_fa3 "$large" .gpu/flash_attn_3.tar.xz.new && mv .gpu/flash_attn_3.tar.xz.new .gpu/flash_attn_3.tar.xz
fi
total=$(cat "$FOLDER"/*.whl .gpu/flash_attn_3.tar.xz | wc -c)
ls -l "$FOLDER" .gpu/flash_attn_3.tar.xz
if [ "$total" -gt "$LIMIT" ]; then
  echo "error: .gpu holds $total bytes, and $LIMIT are allowed; remove a wheel" >&2
  exit 1
fi
echo "$total bytes in .gpu"
