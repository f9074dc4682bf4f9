"""Published wheels of attention kernels, installed by hash into the cache of the tests, outside of the checkout."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.cluster.cache import cache_root, locked

ROOT = Path(__file__).resolve().parents[2]
FA3_LOCK = ROOT / "requirements/images/flash-attention-3.txt"
_EARLIER: Mapping[str, str] = {
    "4.0.0b10": "c686312f84f8108b4a74e632353ccb93f70f113b4f7c54cb4504a632073c72a8",
    "4.0.0b15": "30ad1f66d251938808d2fe68cca664a3e5c0143359c27079d848617a29b00076",
    "4.0.0b20": "3ae4c136b55b7dbfef0204b0046e3faf5fa000a3e18e31e159dbe8ba56d0a4cd",
}
"""Earlier betas of flash-attn-4, with the hashes of their wheels: they return other numbers of values."""
EARLIER_BETAS = tuple(_EARLIER)


def locked_flash_attention_4() -> tuple[str, str]:
    """Return the version of flash-attn-4 that the GPU images contain, and the lines of the lock file that pin it."""
    lock = (ROOT / "requirements/images/common-gpu.txt").read_text()
    found = re.search(r"^flash-attn-4==(\S+) \\\n(?: {4}--hash=sha256:\w+(?: \\)?\n?)+", lock, re.MULTILINE)
    assert found is not None, "requirements/images/common-gpu.txt does not pin flash-attn-4"
    return found[1], found[0]


@cache
def flash_attention_4(version: str) -> Path:
    """Return a folder with the files of a release of flash-attn-4, without its dependencies.

    Args:
        version: the locked version, or one of `EARLIER_BETAS`.

    Raises:
        subprocess.CalledProcessError: the index does not answer, or the wheel has another hash.
    """
    pinned, lines = locked_flash_attention_4()
    if version != pinned:
        lines = f"flash-attn-4=={version} \\\n    --hash=sha256:{_EARLIER[version]}\n"
    return _install(lines)


@cache
def flash_attention_3_sources() -> Path:
    """Return a folder with the packages from which the images make FlashAttention 3 (0.5 GB)."""
    return _install(FA3_LOCK.read_text())


def _install(requirements: str) -> Path:
    """Install requirements with hashes once, and return the folder."""
    folder = cache_root() / f"wheels-{hashlib.sha256(requirements.encode()).hexdigest()[:16]}"
    with locked("wheels"):
        if not (done := folder / ".done").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (listed := folder / "requirements.txt").write_text(requirements)
            uv = Path(sys.executable).with_name("uv")
            command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
            subprocess.run(
                [*command, "--python", sys.executable, "--target", folder, "--requirement", listed], check=True
            )
            done.touch()
    return folder
