"""The `--bench` options of a command line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rlrun.cli.main import main as command_line
from rlrun.cli.rl import main as rl
from rlrun.cli.rl import take_bench
from rlrun.cli.role_commands import trainer
from rlrun.cli.run_layers import SftConfig, fake_data, read_layer
from rlrun.cli.sft import main as sft
from rlrun.config.loading.problems import ConfigError
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.launch import BenchOptions


def test_bench_options_are_removed_and_passed_to_ranks_unchanged() -> None:
    words = ["@", "run.json", "--bench", "--bench.seq-lens", "64,128", "--bench.rows=3", "--seed", "5"]
    rest, options = take_bench(words)
    assert rest == ["@", "run.json", "--seed", "5"]
    assert options == BenchOptions(seq_lens=(64, 128), rows=3)
    flag, text = options.rank_arguments()
    assert flag == "--bench"
    assert BenchOptions.parse_argument(text) == options
    assert take_bench(["--seed", "5"]) == (["--seed", "5"], None)


@pytest.mark.parametrize(
    "show",
    [
        lambda: command_line(["local", "--help"]),
        lambda: command_line(["local", "run.yaml", "--bench", "-h"]),
        lambda: rl(["--help"]),
        lambda: sft(["--help"]),
        lambda: sft(["run.yaml", "--help"]),
        lambda: trainer(["--help"]),
    ],
    ids=["local", "local-bench", "rl", "sft", "sft-manifest", "trainer"],
)
def test_help_lists_bench_options(show: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert show() == exit_codes.OK
    text = capsys.readouterr().out
    assert "\nmeasurement of the training step:\n  --bench  " in text
    assert {"--bench.seq-lens", "--bench.rows", "--bench.steps", "--bench.warmup", "--bench.output"} <= {*text.split()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bench", "--bench.rows", "0"], "--bench.rows: got '0', expected a whole number of at least 1"),
        (["--bench", "--bench.seq-lens", "64,x"], "--bench.seq-lens: got 'x', expected a whole number of at least 2"),
        (["--bench", "--bench.steps"], "--bench.steps: expected one argument"),
        (["--bench.rows", "2"], "--bench.rows: needs --bench"),
    ],
)
def test_bench_error_names_option_and_value(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        take_bench(words)
    assert message in str(caught.value)


def test_fake_data_is_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.toml").write_text("max_steps = 7\n[model]\nname = 'a/b'\n[data]\ntype = 'fake'\nseq_len = 512\n")
    layer = read_layer(["@", "f.toml"], {}, SftConfig).layer
    assert fake_data(layer) == BenchOptions(steps=7)
    assert [notice.line for notice in layer.notices] == [5]
    layer = read_layer(["@", "f.toml", "--data.length", "variable"], {}, SftConfig).layer
    assert fake_data(layer) == BenchOptions(steps=7, seq_lens=(128, 256, 512))
    assert fake_data(read_layer(["@", "f.toml", "--data.type", "sft"], {}, SftConfig).layer) is None
