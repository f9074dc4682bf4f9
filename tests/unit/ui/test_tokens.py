"""Tokens of a rollout, from the batch of its step and the run's tokenizer, without secrets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.ui.rollout_tokens import HIDDEN, hide_secrets, token_pieces
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import SHAPED, Folder, byte_tokenizer, client, made, sample


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return made(tmp_path / "runs" / "demo")


def batch_of(run: Folder, *samples: Sample) -> None:
    run.paths.rollouts.mkdir(exist_ok=True)
    write_batch(run.paths.batch(3, 1), Batch(3, 1, samples))


def test_tokens_have_their_text_probability_advantage_and_version(run: Folder, static: StaticFiles) -> None:
    ids = byte_tokenizer(run).encode("2+2=4 ✓").ids
    batch_of(run, sample(0, 0, [1, 2, 3]), sample(1, 1, ids))
    found = client(run.root, static=static)[0].json(f"/api/runs/{run.id}/rollouts/5/tokens", step=3)
    assert (found["decoded"], found["why"]) == (True, None)
    (sequence,) = found["sequences"]
    assert "".join(sequence["texts"]) == "2+2=4 ✓"
    assert sequence["texts"][-4:] == [" ", "", "", "✓"], "the last byte of a letter completes it"
    assert sequence["sampled"][:3] == [False, False, True]
    assert sequence["logprobs"][1:3] == [0.0, pytest.approx(-2.5 - 2.5 * math.sin(2.6), abs=1e-3)]
    assert sequence["advantages"][1:3] == [0.0, -0.25]
    assert sequence["versions"][1:7] == [-1, 1, 1, 1, 1, 2]


def test_tokens_without_tokenizer_are_shown_as_numbers(run: Folder, static: StaticFiles) -> None:
    batch_of(run, sample(0, 0, [11, 12, 13]))
    found = client(run.root, static=static)[0].json(f"/api/runs/{run.id}/rollouts/0/tokens", step=3)
    assert (found["decoded"], found["sequences"][0]["texts"]) == (False, ["11", "12", "13"])


def test_missing_batch_is_explained(run: Folder, static: StaticFiles) -> None:
    asked, _ = client(run.root, static=static)
    found = asked.json(f"/api/runs/{run.id}/rollouts/0/tokens", step=3)
    assert "no longer on the volume" in found["why"]
    batch_of(run, sample(9, 9, [1, 2, 3]))
    assert (
        asked.json(f"/api/runs/{run.id}/rollouts/0/tokens", step=3)["why"] == "the batch does not contain this rollout"
    )
    run.write("rollouts/step_00000003.a0001/batch.json", "{torn")
    assert "cannot read the batch" in asked.json(f"/api/runs/{run.id}/rollouts/0/tokens", step=3)["why"]


def test_tokenizer_outside_run_is_not_read(run: Folder, static: StaticFiles) -> None:
    byte_tokenizer(run)
    outside = run.root.parent / "outside"
    run.paths.model.rename(outside)
    run.paths.model.symlink_to(outside)
    batch_of(run, sample(0, 0, [1, 2, 3]))
    assert client(run.root, static=static)[0].get(f"/api/runs/{run.id}/rollouts/0/tokens", step=3).status == 403


def test_secret_across_tokens_is_hidden(run: Folder, static: StaticFiles) -> None:
    ids = byte_tokenizer(run).encode(f"key {SHAPED} end").ids
    batch_of(run, sample(0, 0, ids))
    found = client(run.root, static=static)[0].json(f"/api/runs/{run.id}/rollouts/0/tokens", step=3)
    texts = found["sequences"][0]["texts"]
    assert "".join(texts) == f"key {HIDDEN * len(SHAPED)} end"
    assert hide_secrets(["ab", "cd", "ef"], lambda _: [(1, 3)]) == [HIDDEN, HIDDEN, "ef"]


def test_pieces_join_to_the_text() -> None:
    words = ["▁two", "▁words", "."]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[at] for at in ids).replace("▁", " ").removeprefix(" ")

    assert token_pieces([0, 1, 2], decode) == ["two", " words", "."]
