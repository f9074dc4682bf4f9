#!/bin/sh
# The locked uv, for the build of an image and not in it: kept in the build cache, got when that is empty.
# An image's layers are built by: RUN --mount=type=cache,id=rlrun-tools,target=/opt/tools /opt/requirements/uv.sh ARGUMENTS OF UV
set -eu
lock=$(dirname "$0")/uv.txt
tools=/opt/tools/$(sha256sum "$lock" | cut -c1-16)
if ! [ -e "$tools/complete" ]; then
    python3 -m venv --clear "$tools"
    "$tools/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check --require-hashes --requirement "$lock"
    touch "$tools/complete"
fi
export VIRTUAL_ENV=/opt/rlrun UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
exec "$tools/bin/uv" "$@"
