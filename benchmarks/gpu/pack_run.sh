#!/usr/bin/env bash
# Make .gpu/run1 and .gpu/run2, which git ignores: what a complete run on a GPU machine without a network needs. Then import
# all of it under torch 2.11. Downloads stay in RLRUN_GPU_PACKS (default ~/.cache/rlrun/gpu-packs); the second time takes no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
UV=${UV:-$(dirname "$PYTHON")/uv}
CACHE=${RLRUN_GPU_PACKS:-$HOME/.cache/rlrun/gpu-packs}
mkdir -p "$CACHE/wheels" "$CACHE/build"
"$PYTHON" -m benchmarks.gpu.pack_run lock >"$CACHE/lock.txt"

# Wheels of another lock must not stay: a pack holds one version of each package.
if ! cmp -s "$CACHE/lock.txt" "$CACHE/wheels/lock.txt"; then
  find "$CACHE/wheels" -name '*.whl' ! -name 'vllm-*' -delete
  platforms=(manylinux_2_17 manylinux_2_24 manylinux_2_26 manylinux_2_27 manylinux_2_28 manylinux_2_31 manylinux_2_34 manylinux_2_35)
  "$PYTHON" -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --python-version 3.12 --implementation cp \
    $(printf -- "--platform=%s_x86_64 " "${platforms[@]}") --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$CACHE/wheels" -r "$CACHE/lock.txt"
  cp "$CACHE/lock.txt" "$CACHE/wheels/lock.txt"
fi
find "$CACHE/wheels" -name 'rlrun-*.whl' -delete
# Built from the tracked files: the build writes next to its sources, and must not write into the checkout.
rm -rf "$CACHE/build/source" && mkdir "$CACHE/build/source"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$CACHE/build/source"
"$UV" build --quiet --wheel --no-build-isolation --python "$PYTHON" --out-dir "$CACHE/wheels" "$CACHE/build/source"
"$PYTHON" -m benchmarks.gpu.pack_run pack "$CACHE/wheels" .gpu

# The machine's versions, and no vLLM: what the packs lack is found here.
if ! cmp -s benchmarks/gpu/machine.txt "$CACHE/torch211/machine.txt"; then
  rm -rf "$CACHE/torch211"
  "$UV" venv --quiet --python 3.12 "$CACHE/torch211"
  "$UV" pip install --quiet --python "$CACHE/torch211/bin/python" -r benchmarks/gpu/machine.txt
  cp benchmarks/gpu/machine.txt "$CACHE/torch211/machine.txt"
fi
rm -rf "$CACHE/site"
OUT=$CACHE/results SITE=$CACHE/site UV=$UV PYTHON=$CACHE/torch211/bin/python benchmarks/gpu/run_complete.sh import
