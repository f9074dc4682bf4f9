"""Checkpoints resumed with any number of ranks, in another run, and as exported models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlrun.cli.main import main
from rlrun.config.models.checkpoint import ResumeConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.protocol.files.attempts import Origin, read_attempt
from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.trainer.conftest import STEPS, make_batch

pytestmark = pytest.mark.full

RANKS = ((1, 1), (2, 2), (4, 1), (1, 1), (4, 2), (2, 1), (1, 1))
"""Ranks and stages of each attempt: every pair of these numbers of ranks occurs in both orders."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_equal(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose parameters no number of ranks divides; the key projections have fewer rows than ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=107, hidden_size=24, intermediate_size=50, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=1, head_dim=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("uneven")
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_checkpoint_resumes_with_any_ranks(
    make_run: Callable[[str], Any], recorded: Path, uneven: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = make_run("undisturbed").train(ranks=1, replay=recorded, model=uneven)
    run = make_run("run")
    for attempt, (ranks, stages) in enumerate(RANKS, start=1):
        last, layout = min(attempt, STEPS), ParallelismConfig(pp=stages)
        found = run.train(
            attempt=attempt, ranks=ranks, replay=recorded, model=uneven, max_steps=last, parallelism=layout
        )
        assert [line["step"] for line in found] == list(range(1, last + 1))
        if attempt > 1:
            assert read_attempt(run.paths.attempt_file(attempt)).base_step == attempt - 1
            before, after = (run.paths.version(attempt - 1, number) for number in (attempt - 1, attempt))
            if before.exists():  # otherwise it is deleted, and the copy of the later attempt counts
                assert_equal(before, after)
            assert_equal(run.paths.export(attempt - 1, attempt - 1), after)
    for one, other in zip(expected, found, strict=True):  # without the optimizer state, step 2 would already differ
        for metric in ("loss", "grad_norm", "entropy"):
            assert other[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-5), (one["step"], metric)

    assert main(["export", str(run.paths.root), "--output", str(tmp_path / "out"), "--step", "3"]) == exit_codes.OK
    assert "the model after step 3" in capsys.readouterr().out
    exported = run.paths.export(3, 3)
    assert_equal(tmp_path / "out", exported)
    for file in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        if file != "model.safetensors.index.json":
            assert (tmp_path / "out" / file).read_bytes() == (exported / file).read_bytes(), file
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 107
    assert main(["export", str(run.paths.root), "--output", str(tmp_path / "out")]) == exit_codes.USAGE
    assert "is not empty" in capsys.readouterr().err
    assert main(["export", str(run.paths.root), "--output", str(tmp_path / "none"), "--step", "9"]) == exit_codes.USAGE
    assert "--step is 9, but the complete checkpoints are of steps: 1, 2, 3, 4, 5, 6" in capsys.readouterr().err


def test_run_starts_from_another_runs_checkpoint(
    make_run: Callable[[str], Any], recorded: Path, tmp_path: Path
) -> None:
    """With the next batches of the other run, the fork computes the same steps, so weights and optimizer state are
    equal.
    """
    other = make_run("other").train(ranks=2, replay=recorded)
    shifted = RunPaths(tmp_path / "shifted")
    for step in (1, 2):
        write_batch(shifted.batch(step, 1), Batch(step, 1, make_batch(step + 4, 1).samples))
    run = make_run("fork")
    checkpoint = {"resume": ResumeConfig(from_run="other", from_step=4), "interval": 1}
    found = run.train(ranks=2, replay=shifted.rollouts, checkpoint=checkpoint, max_steps=1)
    origin = Origin(str(tmp_path / "other/checkpoints/step_00000004.a0001"), 4, 1)
    assert read_attempt(run.paths.attempt_file(1)).origin == origin
    assert "another run's checkpoint" in run.groups[-1].text()
    found = run.train(attempt=2, ranks=2, replay=shifted.rollouts, checkpoint=checkpoint, max_steps=2)
    second = read_attempt(run.paths.attempt_file(2))
    assert (second.base_step, second.base_attempt, second.origin) == (1, 1, origin)  # its own checkpoint has priority
    assert [line["step"] for line in found] == [1, 2]
    for one, other_line in zip(found, other[4:], strict=True):
        for metric in ("loss", "grad_norm", "param_checksum"):
            assert one[metric] == other_line[metric], (one["step"], metric)


def test_checkpoint_of_different_model_is_refused(make_run: Callable[[str], Any], recorded: Path, uneven: Path) -> None:
    make_run("other").train(ranks=1, replay=recorded, max_steps=1)
    run = make_run("fork")
    group = run.start(
        ranks=1, replay=recorded, model=uneven, checkpoint={"resume": ResumeConfig(from_run="other")}, max_steps=1
    )
    assert group.wait() == [exit_codes.DATA]
    error = json.loads((run.paths.logs(1, "trainer") / "error.json").read_text())["message"]
    assert "step_00000001.a0001 is the checkpoint of another model: lm_head.weight is (" in error
    assert "(107, 24) here" in error
