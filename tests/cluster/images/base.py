"""The base of the CPU images without a registry: a minimal Debian with Python, from the distribution's packages."""

import hashlib
import shlex
from collections.abc import Sequence

SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "libnuma1", "python3", "python3-venv")  # vLLM for CPUs is linked against libnuma
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_KEPT = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/log",
)
"""Folders whose content is deleted."""


def base_script(buildah: Sequence[str], reference: str) -> str:
    """A shell script that makes the base image and commits it as `reference`.

    Args:
        buildah: the command with its options.
    """
    program = shlex.join(buildah)
    empty = " ".join(f'"$root/{folder}"' for folder in NOT_KEPT)
    return f"""
container=$({program} from scratch)
trap '{program} rm "$container"' EXIT
root=$({program} mount "$container")
debootstrap --variant=minbase --include={",".join(BASE_PACKAGES)} {SUITE} "$root"
find {empty} -mindepth 1 -delete
{program} umount "$container"
{program} config --env PATH={PATH} "$container"
{program} commit "$container" {shlex.quote(reference)}
"""


def base_key() -> str:
    """Return a short hash of the base image's inputs."""
    return hashlib.sha256(base_script(["buildah"], "base").encode()).hexdigest()[:12]
