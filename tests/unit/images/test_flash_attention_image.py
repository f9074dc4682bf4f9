"""The image with FlashAttention 3: what is left out of it, by its names upstream, and that no other image is changed by it."""

from __future__ import annotations

import re

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
"""Parts that can be left out: read of hopper/setup.py at the commit that the file names."""
COMMIT = "79760b3dc33435bc6c661582ff345b2321bf5f7f"


def text() -> str:
    return (ROOT / FILE).read_text()


def test_it_has_all_that_the_trainer_calls() -> None:
    """A wrong name would do nothing, and the build would take hours; a part too few would fail in a run."""
    left_out = set(re.findall(r"FLASH_ATTENTION_DISABLE_(\w+)=TRUE", text()))
    assert left_out <= FLAGS
    assert not left_out & {"BACKWARD", "VARLEN", "LOCAL", "SOFTCAP", "HDIM64", "HDIM128", "HDIM256"}
    assert BACKENDS["fa3"].features == {"window", "softcap", "sinks", "context"}
    assert BACKENDS["fa3"].head_dims == 256
    assert f"ARG FLASH_ATTENTION_COMMIT={COMMIT}\n" in text(), "the flags' names are those of this commit"


def test_its_stages_begin_with_the_trainers_image_and_end_as_its_user() -> None:
    stages = re.findall(r"^FROM (\S+)", text(), re.MULTILINE)
    assert stages == ["${TRAINER_IMAGE}", "${TRAINER_IMAGE}"]
    build, last = text().split("\nFROM ")[1:]
    assert build.index("flash-attention.txt") < build.index("git init") < build.index("setup.py")
    assert "COPY --from=build /wheels " in last
    assert [entry.rest for entry in parse(last) if entry.name == "USER"][-1] == "1000:1000"


def test_what_it_copies_is_there_and_its_arguments_are_documented() -> None:
    assert files(ROOT, copied(parse(text()), {}), Ignore((ROOT / ".dockerignore").read_text()))
    header = text().split("\n\nARG ")[0]
    assert all(f" {name} " in header.replace(",", " ") for name in arguments(parse(text())))


def test_no_other_image_knows_of_it() -> None:
    for image in IMAGES:
        assert "FLASH_ATTENTION" not in (ROOT / f"Dockerfile.{image}").read_text()
