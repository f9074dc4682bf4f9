"""FlashAttention 3: the stage of the GPU images, and the image that compiles it with soft caps."""

from __future__ import annotations

import re

import pytest

from rlrun.fit.attention_kernels import BACKENDS
from tests.cluster.images import IMAGES
from tests.cluster.images.builder import ROOT
from tests.cluster.images.inputs import Ignore, arguments, copied, files, parse

FILE = "Dockerfile.flash-attention"
FLAGS = {
    *(
        "BACKWARD",
        "SPLIT",
        "PAGEDKV",
        "APPENDKV",
        "LOCAL",
        "SOFTCAP",
        "PACKGQA",
        "FP16",
        "FP8",
        "VARLEN",
        "CLUSTER",
        "SM80",
    ),
    *("HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256", "HDIMDIFF64", "HDIMDIFF192"),
}
"""Optional parts, from hopper/setup.py at the commit that the file names."""
COMMIT = "79760b3dc33435bc6c661582ff345b2321bf5f7f"


def text() -> str:
    return (ROOT / FILE).read_text()


def test_flash_attention_image_includes_all_used_parts() -> None:
    """A wrong name has no effect and makes the build take hours; a missing part fails in a run."""
    left_out = set(re.findall(r"FLASH_ATTENTION_DISABLE_(\w+)=TRUE", text()))
    assert left_out <= FLAGS
    assert not left_out & {"BACKWARD", "VARLEN", "LOCAL", "SOFTCAP", "HDIM64", "HDIM128", "HDIM256"}
    assert BACKENDS["fa3"].features == {"window", "softcap", "sinks", "context"}
    assert BACKENDS["fa3"].head_dims == 256
    assert f"ARG FLASH_ATTENTION_COMMIT={COMMIT}\n" in text(), "the flags' names are those of this commit"


def test_flash_attention_image_extends_trainer_with_same_user() -> None:
    stages = re.findall(r"^FROM (\S+)", text(), re.MULTILINE)
    assert stages == ["${DEVEL_IMAGE}", "${TRAINER_IMAGE}"], "only the build needs a CUDA compiler"
    build, last = text().split("\nFROM ")[1:]
    assert build.index("flash-attention.txt") < build.index("git init") < build.index("setup.py")
    assert "COPY --from=build /wheels " in last
    assert [entry.rest for entry in parse(last) if entry.name == "USER"][-1] == "1000:1000"


def test_flash_attention_image_copies_existing_files_with_documented_arguments() -> None:
    assert files(ROOT, copied(parse(text()), {}), Ignore((ROOT / ".dockerignore").read_text()))
    header = text().split("\n\nARG ")[0]
    assert all(f" {name} " in header.replace(",", " ") for name in arguments(parse(text())))


def test_other_images_do_not_mention_flash_attention() -> None:
    for image in IMAGES:
        assert "FLASH_ATTENTION" not in (ROOT / f"Dockerfile.{image}").read_text()


@pytest.mark.parametrize("image", ["trainer", "inference"])
def test_gpu_images_get_flash_attention_3_by_hash(image: str) -> None:
    """The package is not installed in CPU images and on other processors, for which no wheel exists."""
    dockerfile = (ROOT / f"Dockerfile.{image}").read_text()
    stage = dockerfile.split("\nFROM base AS flash-attention-3\n")[1].split("\nFROM ")[0]
    (run,) = [entry.rest for entry in parse(stage) if entry.name == "RUN"]
    condition, _, commands = " ".join(run.split()).partition("; then ")
    assert condition.endswith('if [ "${ACCELERATOR}" = gpu ] && [ "$(uname -m)" = x86_64 ]')
    fetched, written, installed, removed = commands.removesuffix("; fi").split(" && ")
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(fetched.split())
    assert fetched.endswith("--target /opt/installed --requirement /opt/requirements/flash-attention-3.txt")
    assert written == "python3 /opt/requirements/flash_attention_3.py /opt/installed /opt/wheels"
    assert {"--no-index", "--no-deps"} <= set(installed.split())
    assert removed == "rm -r /opt/installed /opt/wheels"
    common = dockerfile.split(" AS common\n")[1].split("\nFROM ")[0]
    assert [entry.rest for entry in parse(common) if entry.name == "COPY"][-1].startswith("--from=flash-attention-3 ")
    assert not re.search("nvcc|setup.py|git ", stage), "nothing is compiled"
