"""Count of unplayable training prompts by `rlrun validate`, if model and data are on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.environments.process.user_code_check import check_subjects
from rlrun.local.read_inputs import prompt_checks
from rlrun.orchestrator.rollouts.playable_tasks import count_unplayable
from rlrun.protocol.files.failures import RoleError


def write_rows(folder: Path, *, long: int, short: int) -> dict[str, Any]:
    prompts = [("a" * 200 if i < long else "hi") + str(i) for i in range(long + short)]
    for split in ("train", "test"):
        lines = [
            {"uid": f"{split}-{i}", "prompt": f"{text}{split[0]}", "ground_truth": "1"}
            for i, text in enumerate(prompts)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"path": str(folder), "train_split": "train", "eval_split": "test", "reward": "exact"}


def count_notices(args: dict[str, Any], tokenizer: Path, seq_len: int = 64) -> list[str]:
    return count_unplayable(
        id="dataset",
        args=args,
        folder=str(tokenizer),
        trust_remote_code=False,
        seq_len=seq_len,
        template_arguments={},
    )


def test_prompts_without_room_are_counted_and_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    args = write_rows(tmp_path, long=5, short=95)
    (notice,) = count_notices(args, tokenizer_folder)
    assert notice.startswith(
        "of the first 100 of 100 training prompts 5 leave no room for a reply below seqLen (64) (task 'train-0' has 2"
    )
    assert count_notices(args, tokenizer_folder, seq_len=512) == []


def test_data_with_mostly_long_prompts_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(RoleError, match=r"6 leave no room .* increase seqLen, or remove these rows from the data"):
        count_notices(write_rows(tmp_path, long=6, short=4), tokenizer_folder)


def test_problems_of_other_checks_are_not_repeated(tmp_path: Path, tokenizer_folder: Path) -> None:
    assert count_notices({"path": str(tmp_path / "none.jsonl")}, tokenizer_folder) == []
    assert count_notices(write_rows(tmp_path, long=5, short=5), tmp_path) == []


@pytest.mark.full  # Starts a process that imports transformers.
def test_prompt_length_check_runs_in_a_process(tmp_path: Path, tokenizer_folder: Path) -> None:
    environment = {"id": "dataset", "group_size": 2, "args": write_rows(tmp_path, long=5, short=95)}
    spec = RLRunSpec.model_validate(
        {
            "task": "RL",
            "model": {"path": str(tokenizer_folder)},
            "seq_len": 64,
            "sampling": {"max_tokens": 8},
            "environments": [environment],
        }
    )
    (piece,) = prompt_checks(spec, set())
    assert piece.key == ("environments", 0, "args")
    notices: list[str] = []
    assert check_subjects([(piece.command, piece.limits)], lambda _, text: notices.append(text)) == [None]
    assert "5 leave no room" in notices[0]
    assert not [*prompt_checks(spec, {("model", "path")})]
