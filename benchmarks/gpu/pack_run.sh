#!/usr/bin/env bash
# Make .gpu/run1 and .gpu/run2, which git ignores: what a complete run on a GPU machine without a network needs. Then import
# all of it under torch 2.11. Downloads stay in RLRUN_GPU_PACKS (default ~/.cache/rlrun/gpu-packs); the second time takes no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
UV=${UV:-$(dirname "$PYTHON")/uv}
CACHE=${RLRUN_GPU_PACKS:-$HOME/.cache/rlrun/gpu-packs}
fail() { echo "error: $1" >&2; exit 1; }
for program in git nm "$PYTHON" "$UV"; do
  command -v "$program" >/dev/null || fail "the program $program is missing; install git and binutils, and run \`make install\` for .venv"
done
mkdir -p "$CACHE/wheels" "$CACHE/build" || fail "$CACHE cannot be written; set RLRUN_GPU_PACKS to another folder"
exec 9>"$CACHE/lock"
flock --nonblock 9 || fail "another pack_run.sh uses $CACHE; wait for its end, or set RLRUN_GPU_PACKS to another folder"

# The environment of the last step, looked for before the work of minutes. The machine has Python 3.12, and wheels are of one version.
find_python() {
  local candidate
  for candidate in "${PYTHON312:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    "$candidate" -c 'import lzma, sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && { echo "$candidate"; return; }
  done
  "$UV" python install --quiet 3.12 >&2 && "$UV" python find 3.12
}
if ! cmp -s benchmarks/gpu/machine.txt "$CACHE/torch211/machine.txt"; then
  interpreter=$(find_python) || fail "no Python 3.12 with lzma; install it, and set PYTHON312 to its path"
  "$PYTHON" -m benchmarks.gpu.pack_run space "$CACHE" 12
fi

"$PYTHON" -m benchmarks.gpu.pack_run fetch "$CACHE/wheels"
find "$CACHE/wheels" -name 'rlrun-*.whl' -delete
# Built from the tracked files: the build writes next to its sources, and must not write into the checkout.
rm -rf "$CACHE/build/source" && mkdir "$CACHE/build/source"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$CACHE/build/source"
"$UV" build --quiet --wheel --no-build-isolation --python "$PYTHON" --out-dir "$CACHE/wheels" "$CACHE/build/source"
rm -rf "$CACHE/build/source"
"$PYTHON" -m benchmarks.gpu.pack_run pack "$CACHE/wheels" .gpu

# The machine's versions, and no vLLM: what the packs lack is found here.
if ! cmp -s benchmarks/gpu/machine.txt "$CACHE/torch211/machine.txt"; then
  echo "installing the packages of machine.txt into $CACHE/torch211: 6 GB" >&2
  rm -rf "$CACHE/torch211"
  "$UV" venv --quiet --python "$interpreter" "$CACHE/torch211"
  "$UV" pip install --quiet --python "$CACHE/torch211/bin/python" -r benchmarks/gpu/machine.txt ||
    fail "the packages of machine.txt were not installed; run this again where there is a network and 12 GB of free space"
  cp benchmarks/gpu/machine.txt "$CACHE/torch211/machine.txt"
fi
rm -rf "$CACHE/site"
OUT=$CACHE/results SITE=$CACHE/site UV=$UV PYTHON=$CACHE/torch211/bin/python benchmarks/gpu/run_complete.sh import ||
  fail "the packs do not import under torch 2.11; $CACHE/results/packs.md has the reasons"
rm -rf "$CACHE/site"
echo "ready: .gpu/run1 and .gpu/run2"
