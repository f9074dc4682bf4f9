#!/usr/bin/env bash
# Fill .gpu/wheels with what a machine with torch, transformers and numpy, but without a network, lacks: pure wheels of Python 3.12 on x86-64.
# A wheel of FlashAttention-3 built elsewhere may be put beside them; together they stay below 60 MB.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=.gpu/wheels
LIMIT=60000000
mkdir -p "$FOLDER"
find "$FOLDER" -name '*.whl' ! -name 'flash_attn*' -delete
# --no-deps: one version of each, and nothing that is there already. pydantic names the pydantic_core that it needs.
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
fetch() {
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$FOLDER" "$@"
}
pin() { grep -oiE "^$1==[^ ]+" requirements/cpu.txt; }
fetch "$(pin pydantic)" "$(pin pydantic-core)" "$(pin annotated-types)" "$(pin typing-inspection)" "$(pin loguru)"
total=$(cat "$FOLDER"/*.whl | wc -c)
ls -l "$FOLDER"
if [ "$total" -gt "$LIMIT" ]; then
  echo "error: $FOLDER holds $total bytes, and $LIMIT are allowed; remove a wheel" >&2
  exit 1
fi
echo "$total bytes in $FOLDER"
