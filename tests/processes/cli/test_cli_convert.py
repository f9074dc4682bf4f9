"""`rlrun convert` from end to end: the example of its page, and each exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.cli.main import main

PAGE = (Path(__file__).parents[3] / "docs" / "convert.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run_grpo.sh"
    path.write_text(block("text"))
    return path


def write_rows(folder: Path) -> None:
    folder.mkdir(parents=True)
    for split, number in (("train", 128), ("test", 16)):
        rows = (
            {"prompt": [{"role": "user", "content": f"{split} {i}"}], "reward_model": {"ground_truth": str(i)}}
            for i in range(number)
        )
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_example_of_page_converts_and_validates(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "data" / "gsm8k")
    assert main(["convert", str(script), "-o", "run.yaml"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().err
    assert "rollout.top_p=0.95" in told
    text = (tmp_path / "run.yaml").read_text()
    for line in block("yaml").splitlines():
        assert line in text
    assert main(["validate", "run.yaml"]) == 0
    assert main(["convert", str(script), "-o", "run.yaml"]) == 64, "a file that is there is not replaced unasked"
    assert main(["convert", str(script), "trainer.total_training_steps=9", "-o", "run.yaml", "--force"]) == 0
    assert "maxSteps: 9" in (tmp_path / "run.yaml").read_text()


def test_missing_data_is_reported_and_manifest_is_written(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(script), "-o", "run.yaml"]) == 65
    told = capsys.readouterr().err
    assert "no file or folder data/gsm8k" in told
    assert (tmp_path / "run.yaml").is_file()
    assert main(["convert", str(script), "data.train_files=elsewhere/a.parquet"]) == 65
    out, told = capsys.readouterr()
    assert "missing: spec.maxSteps" in told
    assert out.startswith("# Created by `rlrun convert`")


def test_unsupported_options_and_wrong_commands_write_nothing(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(script), "algorithm.adv_estimator=remax", "-o", "run.yaml"]) == 78
    assert "nearest: rloo" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text("max_steps = 3\n")
    assert main(["convert", "run.toml", "-o", "run.yaml"]) == 78
    assert "environments is empty" in capsys.readouterr().err
    assert main(["validate", "run.toml"]) == 78
    assert "rlrun convert run.toml -o run.yaml" in capsys.readouterr().err
    assert main(["convert", "nowhere.sh", "-o", "run.yaml"]) == 78
    assert main(["convert"]) == 64
    assert main(["convert", str(script), "-o", "nowhere/run.yaml"]) == 64
    assert "there is no folder nowhere" in capsys.readouterr().err
    assert main(["convert", str(script), "--rowz", "3"]) == 64
    assert main(["convert", ".", "-o", "run.yaml"]) == 78
    assert main(["convert", str(script), "--rows", "0"]) == 64
    assert not (tmp_path / "run.yaml").exists()


def test_prime_rl_toml_becomes_a_valid_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "max_steps = 3\n[model]\nname = 'org/m'\n[log]\nlevel = 'debug'\n[[environments]]\nid = 'reverse-text'\n"
    Path("rl.toml").write_text(text + "[trainer.optim]\nlr = 1e-5\n")
    assert main(["convert", "rl", "@", "rl.toml", "trainer.optim.lr=2e-5", "-o", "run.yaml"]) == 0, (
        capsys.readouterr().err
    )
    manifest = Path("run.yaml").read_text()
    assert "lr: 2.0e-05  # --trainer.optim.lr=2e-5" in manifest
    assert '#   log={"level": "debug"}: dropped: every role writes its log' in manifest
    assert main(["validate", "run.yaml"]) == 0
    assert main(["validate", "run.yaml", "--allocation", "vllm:d4t2+fsdp:d8"]) == 0
    assert "is trainer: 1 x 8 GPUs, inference: 4 x 2 GPUs" in capsys.readouterr().out
