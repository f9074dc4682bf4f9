"""Small soak test: its runs succeed, and it reports a failing one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlrun.config.models.learning import AlgorithmConfig
from tests.soak.runs import Variant, play, variants
from tests.trainer.conftest import Zygote

pytestmark = pytest.mark.full

CRASHES = AlgorithmConfig.model_validate({"loss": {"name": "crashing_loss:crashes_on_rank_1"}})


@pytest.mark.parametrize("size", [2, 4])
def test_short_soak_run_succeeds(tmp_path: Path, model: Path, zygote: Zygote, size: int) -> None:
    outcome = play(Variant(size, 4, 0.0001, save_async=True), tmp_path / "run", model, zygote)
    assert not outcome.failed, outcome.told


def test_soak_reports_crash_with_its_last_frames(tmp_path: Path, model: Path, zygote: Zygote) -> None:
    variant = Variant(2, 4, 0.005, save_async=True, options={"algorithm": CRASHES, "micro_batch_tokens": 32})
    outcome = play(variant, tmp_path / "run", model, zygote)
    assert outcome.codes[1] == -signal.SIGSEGV
    assert outcome.told.startswith("rank 1:\nFatal Python error: Segmentation fault\nCurrent thread")
    assert "in crashes_on_rank_1" in outcome.told


def test_soak_variants_are_reproducible_by_seed() -> None:
    one = list(variants(40, 10, 1))
    assert one == list(variants(40, 10, 1)) != list(variants(40, 10, 2))
    assert {variant.ranks for variant in one} == {2, 4}
