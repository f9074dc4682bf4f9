"""`rlrun rows` and the environment `dataset` on files of public sets and of users."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli.main import main
from rlrun.environments import EnvironmentLoadError, load_environment
from rlrun.runtime import exit_codes


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def gsm8k(*numbers: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n}?", "answer": f"It is.\n#### {n}"} for n in numbers]


def test_row_uids_stay_stable_when_rows_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.jsonl", gsm8k(1, 2, 2)), write(tmp_path / "b.jsonl", gsm8k(0, 1, 3, 2))
    for file in (first, second):
        words = ["rows", "--path", str(file), "--layout", "gsm8k", "--output", str(file.with_suffix(".out.jsonl"))]
        assert main(words) == exit_codes.OK
    before = {row["reward_model"]["ground_truth"]: row["uid"] for row in read(first.with_suffix(".out.jsonl"))[:2]}
    after = {row["reward_model"]["ground_truth"]: row["uid"] for row in read(second.with_suffix(".out.jsonl"))}
    assert before.items() <= after.items()
    assert read(first.with_suffix(".out.jsonl"))[2]["uid"] == f"{before['2']}-2"
    assert "3 rows, 3 of them with a new uid" in capsys.readouterr().out


def test_converted_rows_are_playable(tmp_path: Path) -> None:
    source, rows = write(tmp_path / "train.jsonl", gsm8k(*range(40), 3)), tmp_path / "rows.jsonl"
    words = ["--layout", "gsm8k", "--unique", "--instruction", "Box it."]
    assert main(["rows", "--path", str(source), *words, "--output", str(rows)]) == exit_codes.OK
    written = load_environment("dataset", {"path": str(rows)})
    args = {"path": str(source), "layout": "gsm8k", "unique": True, "instruction": "Box it."}
    converted = load_environment("dataset", args)
    assert len(written.tasks("train")) + len(written.tasks("eval")) == 40
    task, same = written.tasks("train")[0], {task.answer: task for task in converted.tasks("train")}
    assert task.prompt == [{"role": "user", "content": f"What is {task.answer}?\n\nBox it."}]
    assert same[task.answer].prompt == task.prompt
    assert len(task.id) == 16


def test_duplicated_rows_of_a_set_are_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": f"{i}?", "reward_model": {"ground_truth": "1"}, "data_source": "d", "extra_info": {"index": f"x{i}"}}
        for i in range(30)
    ]
    args = {"path": str(write(tmp_path / "dapo.jsonl", rows * 3)), "layout": "dapo"}
    environment = load_environment("dataset", args)
    ids = [task.id for split in ("train", "eval") for task in environment.tasks(split)]  # type: ignore[arg-type]
    assert sorted(ids) == sorted(f"x{i}" for i in range(30))
    assert "60 rows of" in capsys.readouterr().out
    twice = load_environment("dataset", args | {"unique": False})
    assert len(twice.tasks("train")) + len(twice.tasks("eval")) == 90


def test_question_of_wrong_type_is_refused_with_line(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": 7, "answer": "#### 7"}, *gsm8k(1)])
    write(tmp_path / "test.jsonl", gsm8k(2))
    with pytest.raises(EnvironmentLoadError, match=r"train\.jsonl line 1: the question is not a text: '7'"):
        load_environment("gsm8k", {"path": str(tmp_path)})


def test_csv_is_read_if_folder_has_no_other_format(tmp_path: Path) -> None:
    lines = "".join(f'"{i}?",{i}\n' for i in range(40))
    (tmp_path / "rows.csv").write_text("prompt,reward_model.ground_truth\n" + lines)
    environment = load_environment("dataset", {"path": str(tmp_path), "reward": "exact"})
    assert environment.tasks("train")[0].answer == "0"
    write(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "ground_truth": "other"} for i in range(40)])
    assert load_environment("dataset", {"path": str(tmp_path)}).tasks("train")[0].answer == "other"


@pytest.mark.parametrize(
    ("rows", "words", "says", "code"),
    [
        (
            gsm8k(1),
            [],
            "rows.jsonl line 1: the column 'prompt' is missing (columns: question, answer)",
            exit_codes.DATA,
        ),
        (gsm8k(1), ["--layout", "dapo"], "column 'prompt' is missing", exit_codes.DATA),
        (
            [{"prompt": "?", "ground_truth": "1", "uid": "a"}] * 2,
            [],
            "its uid 'a' is also the uid of rows.jsonl",
            exit_codes.DATA,
        ),
        ([{"prompt": 3, "ground_truth": "1"}], [], "prompt is neither a text nor a list", exit_codes.DATA),
        ([{"prompt": "?"}], [], "the ground truth is missing: no field 'ground_truth'", exit_codes.DATA),
        (gsm8k(1), ["--revision", "x"], "--revision: revision (x) needs name", exit_codes.USAGE),
    ],
)
def test_row_conversion_error_names_line(
    rows: list[dict[str, Any]],
    words: list[str],
    says: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path / "rows.jsonl", rows)
    assert main(["rows", "--path", str(file), *words, "--output", str(tmp_path / "out.jsonl")]) == code
    error = capsys.readouterr().err
    assert says in error
    assert not (tmp_path / "out.jsonl").exists()


def test_unset_layout_error_names_recognized_layout(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLoadError, match="these columns have layout: gsm8k"):
        load_environment("dataset", {"path": str(write(tmp_path / "rows.jsonl", gsm8k(1, 2)))})


def test_documented_rows_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (command,) = re.findall(r"^rlrun (rows .*)$", page, re.MULTILINE)
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "train.jsonl", gsm8k(1, 2))
    write(tmp_path / "gsm8k" / "test.jsonl", gsm8k(3))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == exit_codes.OK
    asked = [row["prompt"][0]["content"] for row in read(tmp_path / "rows.jsonl")]
    assert asked == ["What is 1?\n\nEnd with the number.", "What is 2?\n\nEnd with the number."]


def test_subfolder_of_rows_is_selected(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    write(tmp_path / "main" / "train.jsonl", gsm8k(1))
    write(tmp_path / "train.jsonl", [{"text": "of another kind"}])
    words = ["rows", "--path", str(tmp_path), "--subset", "main", "--layout", "gsm8k"]
    assert main([*words, "--output", str(tmp_path / "rows.jsonl")]) == exit_codes.OK
    assert len(read(tmp_path / "rows.jsonl")) == 1
