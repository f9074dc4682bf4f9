"""Layouts of four ranks, compared with one rank: loss, gradients, weights, checkpoints and published files."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from tests.support.programs import kill_tree
from tests.trainer.conftest import Group, Zygote

TOLERANCE = 1e-4
LOGPROB_TOLERANCE = 1e-5
PADDING = 1.3
"""Limit of gradient bytes between micro-batches relative to a rank's parameters, because small tensors do not divide
evenly.
"""
CASES = {
    "llama": ("fsdp4", "tp4:full", "cp2xfsdp2:offload", "fsdp4:local", "pp2xreplicate2"),
    "deep": (
        "pp4:full",
        "pp2xreplicate2-interleaved",
        "fsdp4",
        "pp2xfsdp2:local",
        "pp2xfsdp2-zero:local",
        "pp2xreplicate2-zbv:local:full",
    ),
    "qwen3": (
        "hsdp2x2",
        "hsdp2x2:local",
        "tp2xfsdp2",
        "cp4",
        "tp4",
        "cp2xreplicate2",
        "tp2xcp2",
        "tp2xreplicate2",
        "pp2xtp2",
        "pp2xcp2",
    ),
    "moe": (
        "ep2xtp2:full",
        "ep4:selective",
        "tp4",
        "ep2xfsdp2:offload",
        "ep2xcp2:selective",
        "ep2xreplicate2",
        "ep4xcp2",
        "ep2xreplicate2:local",
        "pp2xep2",
    ),
    "few": ("hsdp2x2:moments", "fsdp4"),  # fewer experts than ranks
    "few+muon": ("fsdp4",),
    "qwen2": ("tp2xcp2",),  # biases, and windows across context ranks
    "gemma2": ("tp2xcp2:offload",),  # caps, and norms after the sum over tensor ranks
    "phi3": ("tp2xcp2", "tp4"),  # joined projections
    "olmo2": ("tp2xcp2",),  # norms over all heads
    "starcoder2": ("tp2xcp2",),  # biases of summed outputs
    "gpt_oss": ("cp4",),  # sinks
    "glm4+lora": ("tp2xfsdp2",),
    "qwen3+lora": ("hsdp2x2", "tp2xfsdp2:moments", "cp4", "pp2xfsdp2"),
    "moe+lora": ("ep2xfsdp2", "ep2xtp2", "ep2xcp2"),
    "qwen3+muon": ("tp2xfsdp2:moments", "tp4", "pp2xfsdp2:moments"),
    "moe+muon": ("ep2xtp2", "ep4:moments"),
}
CRITICS = {"qwen3+critic": ("tp2xcp2", "cp2xfsdp2"), "gemma2+critic": ("tp2xfsdp2",)}
GATE = {
    ("qwen3", "hsdp2x2"),
    ("qwen3", "tp2xcp2"),
    ("moe", "pp2xep2"),
    ("qwen3+lora", "tp2xfsdp2:moments"),
    ("qwen3+muon", "tp2xfsdp2:moments"),
    ("qwen3+critic", "tp2xcp2"),
}
"""Each parallel dimension, adapters, Muon and a critic in few layouts; the full set has the others."""


def parameters(families: Mapping[str, Sequence[str]]) -> list[Any]:
    """Return family and layout of each test."""
    return [
        pytest.param(family, layout, marks=[] if (family, layout) in GATE else pytest.mark.full)
        for family, layouts in families.items()
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Return family and layout of the selected tests, in order."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    return [(item.callspec.params["family"], item.callspec.params["layout"]) for item in items]


class Forking(Group):
    """Process that forks the ranks."""

    def kill(self, number: int = signal.SIGKILL) -> None:
        for pid in self.pids:
            kill_tree(pid)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[str, str]], zygote: Zygote) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    arguments, log = [str(folder), str(free_port()), *map(":".join, cases)], folder / "log"
    group = Forking([zygote.start({}, arguments, log, "tests.trainer.layouts")], log, zygote)
    assert group.wait() == [0], group.text()[-4000:]
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize(("family", "layout"), parameters(CASES))
def test_layout_matches_single_rank(
    found: dict[str, Any], cases: list[tuple[str, str]], family: str, layout: str
) -> None:
    case = found[f"{family}:{layout}"]
    assert case["checksum_exact"]
    assert case.get("logprob_error", 0) < LOGPROB_TOLERANCE
    assert case["entries_exact"]
    if "-" not in layout:  # with several stages, the passes of the first layer may end before a gradient exists
        assert (1 <= case["held"] < PADDING) == ("local" not in layout)
    assert case["held"] < PADDING or "local" in layout
    assert ("validation_error" in case) == ("pp" in layout) != ("logprob_error" in case)
    assert case.get("validation_error", 0) < TOLERANCE
    assert case.get("linear_error", 0) < TOLERANCE
    assert case.get("sent_exact", True)
    steps = [case]
    if layout != next(
        other for owner, other in cases if owner == family
    ):  # resumes from the checkpoint of the previous layout
        assert case["resumed"]["step"] == 1
        steps.append(case["resumed"])
    for step in steps:
        for metric, value in step["expected"].items():
            assert step[metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric
        assert step["gradient_error"] < TOLERANCE
        assert step["published_error"] < TOLERANCE


@pytest.mark.parametrize(("family", "layout"), parameters(CRITICS))
def test_critic_layout_matches_single_rank(found: dict[str, Any], family: str, layout: str) -> None:
    errors = found[f"{family}:{layout}"]
    assert {"values", "returns", "advantages", "value_loss", "grad_norm", "gradient", "parameters"} <= errors.keys()
    assert max(errors.values()) < TOLERANCE
