"""Stage of the GPU images with FlashAttention 3, and the step that makes installed packages smaller."""

from __future__ import annotations

import re

import pytest

from tests.cluster.images.builder import ROOT
from tests.cluster.images.inputs import parse


@pytest.mark.parametrize("image", ["trainer", "inference"])
def test_gpu_images_get_flash_attention_3_by_hash(image: str) -> None:
    """The package is not installed in CPU images and on other processors, for which no wheel exists."""
    dockerfile = (ROOT / f"Dockerfile.{image}").read_text()
    stage = dockerfile.split("\nFROM base AS flash-attention-3\n")[1].split("\nFROM ")[0]
    (run,) = [entry.rest for entry in parse(stage) if entry.name == "RUN"]
    condition, _, commands = " ".join(run.split()).partition("; then ")
    assert condition.endswith('if [ "${ACCELERATOR}" = gpu ] && [ "$(uname -m)" = x86_64 ]')
    fetched, folder, written, installed, removed = commands.removesuffix("; fi").split(" && ")
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(fetched.split())
    assert fetched.endswith("--target /opt/installed --requirement /opt/requirements/flash-attention-3.txt")
    assert folder == "cd /opt/requirements"
    assert written == "python3 -m tools.flash_attention_3 /opt/installed /opt/wheels"
    assert {"--no-index", "--no-deps"} <= set(installed.split())
    assert removed == "rm -r /opt/installed /opt/wheels"
    common = dockerfile.split(" AS common\n")[1].split("\nFROM ")[0]
    assert [entry.rest for entry in parse(common) if entry.name == "COPY"][-1].startswith("--from=flash-attention-3 ")
    assert not re.search("nvcc|setup.py|git ", stage), "nothing is compiled"


@pytest.mark.parametrize("image", ["trainer", "inference"])
def test_packages_of_gpu_images_are_made_smaller_in_their_own_layer(image: str) -> None:
    """A file that a later layer changes or deletes is still in the earlier one."""
    stages = (ROOT / f"Dockerfile.{image}").read_text().split("\nFROM ")
    for name, lock in (("common", "common"), ("runtime", image)):
        (stage,) = [stage for stage in stages if stage.partition("\n")[0].endswith(f" AS {name}")]
        (run,) = [
            each.rest for each in parse(stage) if f"/opt/requirements/{lock}.txt" in each.rest and each.name == "RUN"
        ]
        assert "cd /opt/requirements && python3 -m tools.slim_packages /opt/rlrun/lib/python3*/site-packages; fi" in run
        assert '[ "${ACCELERATOR}" = ' in run
