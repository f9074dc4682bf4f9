"""`rl`, `sft`, `eval`, `synthesize` and `--bench`: one report of the mistakes of all layers, before any start."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.cli import rl, sft
from rlrun.cli.main import main
from tests.support.programs import run_program
from tests.support.python_path import before
from tests.support.qwen3_weights import QWEN3, SIZES, write_qwen3_weights
from tests.support.stub.model import tokenizer_files

RL = """\
max_stps = 3
max_steps = "10"
seq_len = 512
[model]
path = "nowhere"
[sampling]
max_tokens = 4096
[algorithm]
preset = "grpo"
advantage = { name = "no_such_module:best" }
[[environments]]
id = "no_such_package:make"
[[environments]]
id = "arithmetic"
group_size = 0
args = { no = 1 }
[ckpt]
interval = 0
"""
RL_FOUND = [
    "run.toml:1: max_stps: unknown field (did you mean max_steps?)",
    'run.toml:2: max_steps: got "10" (a string), expected a whole number',
    "run.toml:5: model.path: no folder nowhere in ",
    "sampling.maxTokens (4096) must be less than seqLen (512)",
    "run.toml:10: algorithm.advantage.name: advantage no_such_module:best: cannot import",
    "run.toml:12: environments[0].id: environment 'no_such_package:make'",
    "run.toml:16: environments[1].args: environment 'arithmetic': no argument 'no'",
    "run.toml:15: environments[1].group_size: got 0, expected a whole number from 1",
    "run.toml:18: ckpt.interval: got 0, expected a whole number",
]
SFT = """\
max_stps = 3
max_steps = "10"
[model]
path = "nowhere"
[data]
batch_size = "4"
epochs = 2
shufle = true
[[data.sources]]
path = "gone.jsonl"
[[data.sources]]
path = "bad.jsonl"
[data.validation]
path = "lost.jsonl"
interval = 0
[inference]
replicas = 2
"""
SFT_FOUND = [
    "run.toml:1: max_stps: unknown field (did you mean max_steps?)",
    'run.toml:2: max_steps: got "10" (a string), expected a whole number',
    "run.toml:4: model.path: no folder nowhere in ",
    'run.toml:6: data.batch_size: got "4" (a string), expected a whole number',
    "run.toml:8: data.shufle: unknown field (did you mean shuffle?)",
    "run.toml:10: data.sources[0].path: no file or folder gone.jsonl",
    "run.toml:12: data.sources[1].path: bad.jsonl: bad.jsonl line 2: it is not JSON",
    "run.toml:14: data.validation.path: no file or folder lost.jsonl",
    "run.toml:15: data.validation.interval: got 0, expected a whole number",
    "inference.replicas (2) applies only to task RL",
]


RL_NOTE = "note: run.toml: algorithm: not set: PRIME-RL's own defaults"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    Path("bad.jsonl").write_text(json.dumps(good) + "\n{no\n")


def _assert_lines(lines: list[str], expected: list[str]) -> None:
    unsaid = [words for words in expected if not any(words in line for line in lines)]
    assert unsaid == [], lines
    assert len(lines) == len(expected), lines


@pytest.mark.parametrize(
    ("run", "text", "found"), [(rl.main, RL, [*RL_FOUND, RL_NOTE]), (sft.main, SFT, SFT_FOUND)], ids=["rl", "sft"]
)
def test_toml_mistakes_of_all_layers_are_reported_together(
    run: Callable[[list[str]], int], text: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(text)
    assert run(["@", "run.toml"]) == 78
    _assert_lines(capsys.readouterr().err.splitlines(), found)
    assert not Path("runs").exists()


def test_mistakes_of_files_and_command_line_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.toml").write_text("max_stps = 3\n[model]\npath = 'nowhere'\n")
    Path("o.toml").write_text("[[environments]]\nid = 'no_such_package:make'\n")
    assert rl.main(["--trainer", "@", "t.toml", "--orchestrator", "@", "o.toml", "--seq-len", "4"]) == 78
    _assert_lines(
        capsys.readouterr().err.splitlines(),
        [
            "t.toml:1: max_stps: unknown field (did you mean max_steps?)",
            "t.toml:3: model.path: no folder nowhere",
            "o.toml:2: environments[0].id: environment 'no_such_package:make'",
            "command line: --seq-len: got 4, expected a whole number",
        ],
    )


def test_unreadable_file_does_not_hide_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.toml").write_text("max_stps = 3\n")
    Path("o.toml").write_text("= 3\n")
    words = [
        "--trainer",
        "@",
        "t.toml",
        "--orchestrator",
        "@",
        "o.toml",
        "--inference",
        "@",
        "i.toml",
        "--max-stps",
        "2",
    ]
    assert rl.main(words) == 78
    _assert_lines(
        capsys.readouterr().err.splitlines(),
        [
            "t.toml:1: max_stps: unknown field (did you mean max_steps?)",
            "o.toml:1: not TOML",
            "i.toml: no such file",
            "command line: --max-stps: unknown",
        ],
    )


def test_missing_model_folder_exits_with_data_code(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("[model]\npath = 'nowhere'\n[[environments]]\nid = 'arithmetic'\n")
    assert rl.main(["@", "run.toml"]) == 65
    assert "model.path: no folder nowhere" in capsys.readouterr().err


MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: r}
spec:
  model: {path: nowhere}
  maxSteps: "10"
  seqLen: 64
  sampling: {maxTokens: 8}
  algorithm: {advantage: {name: "no_such_module:best"}}
  environments:
  - {id: "no_such_package:make", groupSize: 1}
  - {id: arithmetic, args: {no: 1}}
"""


@pytest.mark.parametrize("words", [["eval"], ["synthesize", "--output", "d.jsonl"]], ids=["eval", "synthesize"])
def test_eval_and_synthesize_report_mistakes_of_used_fields(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """These commands train nothing and run only the selected environments, so other fields are not checked."""
    Path("run.yaml").write_text(MANIFEST)
    found = [
        "run.yaml:5: spec.model.path: no folder nowhere",
        'run.yaml:6: spec.maxSteps: got "10" (a string)',
        "run.yaml:11: spec.environments[0].id: environment 'no_such_package:make'",
        "run.yaml:12: spec.environments[1].args: environment 'arithmetic': no argument 'no'",
    ]
    assert main([words[0], "run.yaml", *words[1:]]) == 78
    _assert_lines(capsys.readouterr().err.splitlines(), found)
    assert main([words[0], "run.yaml", *words[1:], "--environment-ids", "arithmetic"]) == 78
    _assert_lines(capsys.readouterr().err.splitlines(), [found[0], found[1], found[3]])
    assert {path.name for path in Path.cwd().iterdir()} == {"bad.jsonl", "run.yaml"}, "nothing is made"


def test_bench_checks_model_but_no_environments(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(RL)
    assert rl.main(["@", "run.toml", "--bench"]) == 78
    _assert_lines(capsys.readouterr().err.splitlines(), [*RL_FOUND[:4], *RL_FOUND[7:], RL_NOTE])
    Path("run.yaml").write_text(
        "apiVersion: rlrun.io/v1alpha1\nkind: RLRun\nmetadata: {name: r}\nspec:\n  task: SFT\n  maxSteps: x\n"
        "  model: {path: nowhere}\n  data: {sources: [{path: gone.jsonl}]}\n"
    )
    assert sft.main(["run.yaml", "--bench"]) == 78
    _assert_lines(
        capsys.readouterr().err.splitlines(),
        ["run.yaml:6: spec.maxSteps: got", "run.yaml:7: spec.model.path: no folder nowhere"],
    )


def _write_model(name: str, **config: object) -> str:
    """Write a folder with the configuration of a model family, and with the weights of Qwen 3."""
    folder = Path(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for file, content in tokenizer_files().items():
        (folder / file).write_bytes(content)
    write_qwen3_weights(folder)
    return name


DOGE = {**SIZES, "model_type": "doge", "architectures": ["DogeForCausalLM"]}
TRAINED = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: r}
spec:
  model: {path: PATH}
  maxSteps: 3
  seqLen: 64
  sampling: {maxTokens: 8}
  environments:
  - {id: arithmetic}
"""
REFUSED = "DogeForCausalLM cannot be trained: its attention (DogeAttention) has attention_mask"


@pytest.mark.parametrize(
    "words", [["validate"], pytest.param(["local"], marks=pytest.mark.full)], ids=["validate", "local"]
)
def test_untrainable_model_family_is_refused_together_with_typo(
    words: list[str],
) -> None:
    manifest = TRAINED.replace("PATH", _write_model("doge", **DOGE))
    before = {path.name for path in Path.cwd().iterdir()} | {"run.yaml"}
    refused = f"run.yaml:5: spec.model.path: {REFUSED}"
    typo = "run.yaml:6: spec.maxStps: unknown field (did you mean maxSteps?)"
    told = [([refused, typo], manifest.replace("maxSteps", "maxStps"), "78")]
    if words == ["local"]:  # Without a typo, `local` exits with another code.
        told.append(([refused], manifest, "65"))
    code = f"import sys; from rlrun.cli.main import main; print(main({[*words, 'run.yaml']}), 'torch' in sys.modules)"
    for lines, text, end in told:
        Path("run.yaml").write_text(text)
        done = run_program([sys.executable, "-c", code], check=True)
        assert done.stdout.split() == [end, "False"], "a command line imports no torch"
        _assert_lines(done.stderr.splitlines(), lines)
    assert {path.name for path in Path.cwd().iterdir()} == before, "nothing is made"


@pytest.mark.full
def test_unloadable_reference_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _write_model("doge", **DOGE)
    manifest = TRAINED.replace("PATH", _write_model("qwen", **QWEN3))
    for folder, told in (("doge", REFUSED), ("gone", "no folder")):
        reference = f"  algorithm: {{reference: {{model: {Path.cwd() / folder}}}, regularizers: {{kl: 0.1}}}}\n"
        Path("run.yaml").write_text(manifest + reference)
        assert main(["local", "run.yaml"]) == 78
        _assert_lines(capsys.readouterr().err.splitlines(), [f"run.yaml:11: spec.algorithm.reference.model: {told}"])


def test_check_deferred_to_trainer_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(TRAINED.replace("path: PATH", "name: Qwen/Qwen3-0.6B"))
    assert main(["validate", "run.yaml"]) == 0
    told = capsys.readouterr().out.splitlines()[1:]
    assert len(told) == 1
    assert told[0].startswith(
        "run.yaml: note: spec.model.name Qwen/Qwen3-0.6B is not on this machine, so it is not checked here: at the start the trainer checks"
    )


def test_failed_import_of_torch_refuses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path.cwd() / "torch.py").write_text("raise ImportError('libcuda.so.1')")
    monkeypatch.setenv("PYTHONPATH", before(Path.cwd()))
    Path("run.yaml").write_text(TRAINED.replace("PATH", _write_model("doge", **DOGE)))
    assert main(["validate", "run.yaml"]) == 0
    told = capsys.readouterr().out.splitlines()[1:]
    assert len(told) == 1, told
    assert told[0].startswith(
        "run.yaml: note: spec.model.path is not checked on this machine: ImportError: libcuda.so.1"
    )
