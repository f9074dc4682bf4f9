"""`rlrun validate` and `rlrun local`: one report of all mistakes with line, value and fix; one-line summary of the run."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from rlrun.advantages import advantages
from rlrun.cli.main import main
from rlrun.config.algorithm.tables import ADVANTAGE_ENTRIES
from rlrun.config.models.language_models import ModelConfig, TinyModelConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationSamplingConfig, SamplingConfig
from rlrun.local.judge import GROUP_BASELINES
from rlrun.local.read_inputs import check_engine_dtype, check_template_arguments
from rlrun.runtime import exit_codes
from tests.support.qwen3_weights import QWEN3, write_qwen3_weights
from tests.support.stub.model import tokenizer_files

MISTAKES = """\
apiVersion: rlrun.io/v1
kind: RLRun
metadata: {name: 7Bad}
spec:
  model: {path: nowhere, revision: main}
  maxSteps: "10"
  seqLen: 100
  seqLen: 512
  seqlen: 3
  suspend: on
  algorithm: {preset: grppo, maxAsyncLevel: 9, maxOffPolicySteps: 3}
  sampling: {maxTokens: 4096}
  environments:
  - id: revrse-text
    groupSize: 7
  - id: arithmetic
    args: {no: 1}
  - id: arithmetic
    groupSize: 0
  trainer:
    gpusPerReplica: 0
    cpuOffload: true
    attention: varlen
    optimizer: {name: adamw, momentum: 0.9, lr: 99}
  inference: {minAvailable: 5, gpusPerReplica: 3}
  placement: {pool: -a, topology: {}}
  orchestrator: {batchSize: 10}
"""
FOUND = [
    (1, "apiVersion: got 'rlrun.io/v1', expected rlrun.io/v1alpha1"),
    (3, "metadata.name: '7Bad' is not an RFC 1035 label"),
    (5, "spec.model: revision (main) needs name"),
    (5, "spec.model.path: no folder nowhere"),
    (6, 'spec.maxSteps: got "10" (a string), expected a whole number'),
    (8, "duplicate key 'seqLen': it is already set in line 7"),
    (9, "spec.seqlen: unknown field (did you mean seqLen?)"),
    (10, 'spec.suspend: got "on" (a string), expected true or false'),
    (11, "spec.algorithm.preset: unknown preset 'grppo' (did you mean grpo?)"),
    (11, "spec.algorithm: maxOffPolicySteps (3) must be at least maxAsyncLevel (9)"),
    (12, "spec: sampling.maxTokens (4096) must be less than seqLen (100)"),
    (13, "spec: several environments have the name 'arithmetic'"),
    (14, "spec.environments[0].id: unknown environment 'revrse-text' (did you mean reverse-text?)"),
    (17, "spec.environments[1].args: environment 'arithmetic': no argument 'no'"),
    (19, "spec.environments[2].groupSize: got 0, expected a whole number from 1 to 4096"),
    (22, "spec.trainer: cpuOffload (true) needs GPUs"),
    (23, "spec.trainer: attention (varlen) needs GPUs"),
    (24, "spec.trainer.optimizer.lr: got 99, expected a number greater than 0 and at most 10"),
    (24, "spec.trainer.optimizer: momentum (0.9) has no meaning for optimizer adamw"),
    (25, "spec.inference: gpusPerReplica (3) must be tensorParallel x dataParallel (1)"),
    (25, "spec.inference: minAvailable (5) must be at most replicas (1)"),
    (26, 'spec.placement.pool: got "-a", expected a label value'),
    (26, "spec.placement.topology: set exactly one of required (not set) and preferred (not set)"),
    (
        27,
        "spec: orchestrator.batchSize (10) must be divisible by environments[0].groupSize (7); set batchSize to 7 or 14",
    ),
]
RUN = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: quick}
spec:
"""
SFT = RUN + "  task: SFT\n  model: {tiny: {}}\n  maxSteps: 10\n  data: {batchSize: 4, sources: [{path: chats.jsonl}]}\n"


def write_manifest(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text)
    return name


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", [["validate"], ["local"]], ids=["validate", "local"])
def test_mistakes_of_all_layers_are_reported_in_one_round(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, write_manifest(MISTAKES)]) == 78
    lines = capsys.readouterr().err.splitlines()
    unsaid = [
        found for found in FOUND if not any(line.startswith(f"run.yaml:{found[0]}: {found[1]}") for line in lines)
    ]
    assert unsaid == []
    assert len(lines) == len(FOUND), "something is told that is no mistake"


SINGLE = [
    ("  model: {tiny: {}}\n", ["spec: environments is empty, but task RL needs at least one; add an environment"]),
    ("  environments: [{id: reverse-text}]\n", ["spec.model: required, but not set"]),
    ("  model: {tiny: {}}\n  environments: [{}]\n", ["spec.environments[0].id: required, but not set"]),
    ("  model: {tiny: {}}\n  environments: [5]\n", ["spec.environments[0]: got 5"]),
    ("  model: {tiny: {}}\n  environments: x\n", ['spec.environments: got "x"']),
    ("  model: x\n  environments: [{id: reverse-text}]\n", ['spec.model: got "x"']),
    ("  task: SFT\n  model: {tiny: {}}\n", ["spec: data is not set, but task SFT needs it; set data"]),
    (
        "  task: SFT\n  model: {tiny: {}}\n  environments: [{id: reverse-text}]\n",
        [
            "spec: data is not set, but task SFT needs it; set data",
            "spec: environments needs task RL or Eval, but task is SFT; remove it",
        ],
    ),
    (
        "  model: {tiny: {}}\n  environments: [{id: reverse-text, groupSize: 3}]\n  orchestrator: {batchSize: 99999999999999999999999}\n",
        ["spec.orchestrator.batchSize: got 99999999999999999999999, expected a whole number"],
    ),
    (
        "  model: {tiny: {}}\n  environments: [{id: no}]\n  sampling: {temperature: '1'}\n",
        ["spec.environments[0].id: unknown environment 'no'", 'spec.sampling.temperature: got "1" (a string)'],
    ),
    (
        "  model: {tiny: {}}\n  environments: [{id: reverse-text}]\n  policies: {fromRun: x}\n",
        ["spec: policies needs a task without"],
    ),
]


@pytest.mark.parametrize(("spec", "expected"), SINGLE, ids=range(len(SINGLE)))
def test_consequences_of_a_mistake_are_not_reported(
    spec: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", write_manifest(RUN + spec)]) == 78
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(expected), lines
    assert all(any(words in line for line in lines) for words in expected), lines


UNREADABLE = [
    ("", "contains nothing, expected exactly one RLRun"),
    ("a: b\n---\nc: d\n", "contains 2 documents"),
    (RUN + "  model: {tiny: {}}\n---\n" + RUN + "  model: {tiny: {}}\n", "contains 2 RLRuns (lines 1, 7)"),
    (
        "apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: no}\n",
        "run.yaml:2: kind: got 'Deployment' of 'apps/v1', expected RLRun of rlrun.io/v1alpha1",
    ),
    (RUN + "\tmodel: {}\n", "not YAML: "),
    (RUN + "  model: *nothing\n", "not YAML: found undefined alias"),
    (RUN + "  model: &m {tiny: *m}\n", "an alias contains itself"),
    ("- 1\n- 2\n", "expected exactly one RLRun"),
]


@pytest.mark.parametrize(("text", "said"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_file_without_manifest_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("validate", "local", "render", "eval"):
        assert main([command, write_manifest(text)]) == 78, command
        told = capsys.readouterr().err
        assert said in told, (command, told)
        assert "Traceback" not in told


def test_unreadable_manifest_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.yaml").mkdir()
    Path("binary.yaml").write_bytes(b"kind: \xff\xfe\n")
    for command in ("validate", "local", "render", "eval"):
        for file, said in (
            ("folder.yaml", "is a folder, expected a file"),
            ("binary.yaml", "not UTF-8"),
            ("none.yaml", "no such file"),
        ):
            assert main([command, file]) == 78, command
            assert said in capsys.readouterr().err


def test_validate_summarizes_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert main(["validate", write_manifest(SFT)]) == 0
    told = capsys.readouterr().out
    assert "a tiny model, supervised fine-tuning on chats.jsonl: 10 steps of 4 rows" in told
    assert "rollout" not in told
    evaluation = RUN + (
        "  task: Eval\n  model: {tiny: {}}\n  environments: [{id: reverse-text}]\n  policies: {fromRun: other}\n"
        "  evaluation: {numTasks: 5, samplesPerTask: 3}\n"
    )
    assert main(["validate", write_manifest(evaluation)]) == 0
    told = capsys.readouterr().out
    assert "evaluation of the policies of other, nothing is trained: up to 5 held-out tasks" in told
    assert "3 answers each; reverse-text" in told
    assert "steps of" not in told


BAD_ROWS = [
    ('{"prompt": "a"}\n', "line 1: completion is missing"),
    ('{"prompt": "a", "completion": "b"}\n\n{"prompt": \n', "line 3: it is not JSON"),
    ('{"prompt": "a", "completion": "b"}\n[1]\n', "line 2: it is a list, expected one JSON object per line"),
    ('{"messages": [{"role": "usr", "content": "x"}]}\n', "line 1: "),
    ("", "has no rows"),
]


@pytest.mark.parametrize(("rows", "said"), BAD_ROWS, ids=range(len(BAD_ROWS)))
@pytest.mark.parametrize("command", ["validate", "local", "sft"])
def test_bad_row_is_found_before_start(command: str, rows: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rlrun.cli.sft import main as sft

    Path("chats.jsonl").write_text(rows)
    toml = '[model.tiny]\n[data]\npath = "chats.jsonl"\n'
    code = sft(["@", write_manifest(toml, "run.toml")]) if command == "sft" else main([command, write_manifest(SFT)])
    told = capsys.readouterr().err
    assert code in (65, 78), told
    assert ("run.toml:3: data.path" if command == "sft" else "data.sources[0].path") in told
    assert "chats.jsonl" in told
    assert said in told
    assert not Path("runs").exists()


def test_malformed_rows_can_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chats.jsonl").write_text('nothing\n{"prompt": "a", "completion": "b"}\n')
    assert main(["validate", write_manifest(SFT.replace("batchSize: 4", "batchSize: 4, malformed: Skip"))]) == 0
    assert main(["validate", write_manifest(SFT)]) == 78


def test_model_folder_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN + "  model: {path: model}\n  environments: [{id: reverse-text}]\n"

    def told(text: str = text) -> str:
        assert main(["validate", write_manifest(text)]) == 78
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("run.yaml:5: spec.model.path: ")
        return line

    assert "no folder model" in told()
    Path("model").touch()
    assert "model is a file" in told()
    Path("model").unlink()
    Path("model").mkdir()
    assert "has no config.json, no weights (*.safetensors), no tokenizer" in told()
    Path("model", "model.safetensors").touch()
    for name, content in tokenizer_files().items():
        Path("model", name).write_bytes(content)
    Path("model", "config.json").write_text("{")
    assert "config.json cannot be read" in told()
    Path("model", "config.json").write_text("{}")
    assert "has neither architectures nor model_type" in told()
    Path("model", "config.json").write_text(json.dumps(dict(QWEN3)))
    assert "model/model.safetensors is not a safetensors file; copy or download the file again" in told()
    tensor = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    Path("model", "model.safetensors").write_bytes(len(tensor).to_bytes(8, "little") + tensor + bytes(7))
    assert f"has {15 + len(tensor)} bytes, but its header requires {16 + len(tensor)}" in told()
    Path("model", "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    assert "model/model.safetensors has no tensors; copy or download the file again" in told()
    write_qwen3_weights(Path("model"))
    assert main(["validate", write_manifest(text)]) == 0, "the trainer can train this family"
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (1, "")
    if os.geteuid():
        Path("model").chmod(0)
        assert "cannot be read by this user" in told()


def test_pod_folder_is_noted_by_validate_refused_by_local(capsys: pytest.CaptureFixture[str]) -> None:
    file = write_manifest(RUN + "  model: {path: /data/models/m}\n  environments: [{id: reverse-text}]\n")
    assert main(["validate", file]) == 0
    assert "note: spec.model.path is not checked on this machine: it has no folder /data/models/m" in (
        capsys.readouterr().out
    )
    assert main(["local", file]) == 65
    assert "spec.model.path: no folder /data/models/m" in capsys.readouterr().err


def test_group_size_one_without_learning_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    environments = "  environments: [{id: reverse-text, groupSize: 1}]\n"
    assert main(["validate", write_manifest(RUN + "  model: {tiny: {}}\n" + environments)]) == 0
    told = capsys.readouterr().out
    assert "note: spec.environments[0].groupSize is 1, and advantage" in told
    assert "every advantage is 0" in told
    for advantage in ("{name: reward}", "{name: grpo, options: {mean: batch}}"):
        own = environments.replace("groupSize: 1", f"groupSize: 1, algorithm: {{advantage: {advantage}}}")
        assert main(["validate", write_manifest(RUN + "  model: {tiny: {}}\n" + own)]) == 0
        assert "note" not in capsys.readouterr().out


def test_validate_notes_a_band_below_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    run = RUN + "  model: {tiny: {}}\n"
    plain = "  environments: [{id: reverse-text}]\n"
    assert main(["validate", write_manifest(run + plain + "  algorithm: {preset: gspo, proximal: inference}\n")]) == 0
    assert "note: spec.algorithm.proximal loss gspo measures eps_low (0.0003)" in capsys.readouterr().out
    loss = "{name: ppo, options: {eps_low: 0.001}}"
    own = f"  environments: [{{id: reverse-text, algorithm: {{loss: {loss}}}}}]\n"
    assert main(["validate", write_manifest(run + own)]) == 0
    assert "note: spec.environments[0].algorithm.proximal loss ppo measures eps_low (0.001)" in capsys.readouterr().out
    assert main(["validate", write_manifest(run + plain + "  algorithm: {preset: gspo}\n")]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(name for name, entry in ADVANTAGE_ENTRIES.items() if entry.needs is None))
def test_group_baselines_list_advantages_zero_for_group_of_one(name: str) -> None:
    rewards, lengths = [1.0, 0.0, 0.5], [3.0, 2.0, 5.0]
    found = advantages(name, rewards, group_size=1, lengths=lengths)
    assert (not found.any()) is (name in GROUP_BASELINES)


def test_unused_template_argument_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ enable_thinking }}"}')
    here, tiny = ModelConfig(path=str(tmp_path)), ModelConfig(tiny=TinyModelConfig())
    thinks = SamplingConfig(chat_template_arguments={"enable_thinking": False})
    typo = EvaluationSamplingConfig(chat_template_arguments={"enable_thinkin": False})
    environments = [EnvironmentConfig(id="a"), EnvironmentConfig(id="a", name="b", sampling=thinks)]

    def told(model: ModelConfig) -> list[str]:
        found = check_template_arguments(model, environments, thinks, typo)
        return [
            ".".join(map(str, finding.key[:-1])) for finding in found if "has no argument enable_" in finding.message
        ]

    assert told(here) == ["evaluation.sampling"]
    assert told(tiny) == ["sampling", "evaluation.sampling", "environments.1.sampling"]
    (tmp_path / "chat_template.jinja").write_text("{{ enable_thinkin }}")
    assert told(here) == ["sampling", "environments.1.sampling"], "the file of its own counts"
    assert told(ModelConfig(path=str(tmp_path / "absent"))) == told(ModelConfig(name="org/model")) == []


def test_number_format_that_cpu_engines_refuse_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "linear_num_value_heads": 4}')

    def found(dtype: str, gpus: int) -> list[str]:
        model = ModelConfig(path=str(tmp_path), dtype=dtype)
        return [f"{'.'.join(map(str, one.key))}: {one.message}" for one in check_engine_dtype(model, gpus=gpus)]

    (message,) = found("float32", 0)
    assert message.startswith("model.dtype: 'float32' does not work with the linear attention")
    assert found("bfloat16", 0) == found("float32", 1) == []
    assert list(check_engine_dtype(ModelConfig(name="org/model"), gpus=0)) == []


def test_number_format_of_cpu_engines_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model", "config.json").write_text(json.dumps(QWEN3 | {"linear_num_value_heads": 4}))
    text = RUN + "  model: {path: model, dtype: float32}\n  environments: [{id: reverse-text}]\n"
    assert main(["validate", write_manifest(text)]) == exit_codes.CONFIGURATION
    lines = capsys.readouterr().err.splitlines()
    assert (
        len([line for line in lines if line.startswith("run.yaml:5: spec.model.dtype: 'float32' does not work")]) == 1
    )


def test_unused_template_argument_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN + "  model: {tiny: {}}\n  environments: [{id: reverse-text}]\n"
    text += "  sampling:\n    chatTemplateArguments: {enable_thinking: false}\n"
    line = 1 + text[: text.index("chatTemplateArguments")].count("\n")
    assert main(["validate", write_manifest(text)]) == exit_codes.CONFIGURATION
    told = f":{line}: spec.sampling.chatTemplateArguments: the model's chat template has no argument enable_thinking; remove it"
    assert told in capsys.readouterr().err


OF_A_HUB = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: a}
spec:
  model: {name: Qwen/Qwen3-0.6B}
  environments: [{id: arithmetic}]
"""


def test_validate_reads_standard_input_and_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = OF_A_HUB + "  trainer: {gpusPerReplica: 3, parallelism: {tp: 3}}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(wrong.encode())))
    Path("good.yaml").write_text(OF_A_HUB)
    assert main(["validate", "good.yaml", "-", "--json"]) == 78
    good, bad = json.loads(capsys.readouterr().out)
    assert (good["file"], good["valid"], good["name"], good["problems"]) == ("good.yaml", True, "a", [])
    assert good["summary"].startswith("RLRun a, Qwen/Qwen3-0.6B")
    assert [notice["field"] for notice in good["notices"]] == ["spec.model.name"]
    assert (bad["file"], bad["valid"], bad["summary"]) == ("standard input", False, None)
    (problem,) = bad["problems"]
    assert (problem["field"], problem["line"]) == ("spec.trainer.parallelism.tp", 7)
    assert "must divide the model's key-value heads (8)" in problem["message"]


def test_binary_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main(["validate", "-"]) == 78
    assert "standard input: not UTF-8 text (byte 0)" in capsys.readouterr().err


def test_data_in_pods_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    args = "args: {path: /data/not-here.parquet}"
    Path("run.yaml").write_text(OF_A_HUB.replace("{id: arithmetic}", f"{{id: dataset, {args}}}"))
    assert main(["validate", "run.yaml"]) == 0
    assert "is not checked on this machine: environment 'dataset': args.path" in capsys.readouterr().out
    Path("run.yaml").write_text(OF_A_HUB.replace("{id: arithmetic}", f"{{id: dataset, {args.replace('/data/', '')}}}"))
    assert main(["validate", "run.yaml"]) == 78


def test_data_of_an_unreachable_hub_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("run.yaml").write_text(OF_A_HUB.replace("arithmetic", "gsm8k"))
    assert main(["validate", "run.yaml"]) == 0
    note = (
        "note: spec.environments[0].args is not checked on this machine: environment 'gsm8k': args.name: openai/gsm8k"
    )
    assert note in capsys.readouterr().out
    assert main(["local", "run.yaml"]) == 78


CLUSTER = (
    OF_A_HUB
    + """\
  trainer: {gpusPerReplica: 4, attention: flash2}
  inference: {gpusPerReplica: 1}
  placement: {gpuProduct: H100}
"""
)


def test_kernel_and_product_without_pods_are_notes(capsys: pytest.CaptureFixture[str]) -> None:
    def noted_fields(text: str) -> list[str]:
        Path("run.yaml").write_text(text)
        assert main(["validate", "run.yaml", "--json"]) == 0
        return [notice["field"] for notice in json.loads(capsys.readouterr().out)[0]["notices"][1:]]

    assert noted_fields(CLUSTER) == ["spec.trainer.attention", "spec.placement.gpuProduct"]
    assert noted_fields(CLUSTER.replace("H100", "NVIDIA-H100-80GB-HBM3").replace("flash2", "fa3")) == []
    unknown = CLUSTER.replace("H100", "NVIDIA-A999").replace("flash2", "fa3")
    assert noted_fields(unknown) == ["spec.placement.gpuProduct"]
    own = CLUSTER.replace("flash2}", "flash2, image: registry/own:1}").replace("{gpuProduct: H100}", "{}")
    assert noted_fields(own) == []


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ("", True),
        ("  networkPolicy: {extraEgress: [{ports: [{port: 3128}]}]}\n", False),
        ("  networkPolicy: {mode: None}\n", False),
    ],
)
def test_proxy_from_secret_is_noted_if_nothing_opens_it(
    more: str, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    proxy = "  trainer: {env: [{name: HTTPS_PROXY, valueFrom: {secretKeyRef: {name: for-rlrun-proxy, key: url}}}]}\n"
    assert main(["validate", write_manifest(SFT + proxy + more)]) == 0
    told = "note: spec.trainer.env[0] has HTTPS_PROXY from another object"
    assert (told in "".join(capsys.readouterr())) is noted


ONE_NODE = (
    OF_A_HUB
    + """\
  trainer: {replicas: 2, gpusPerReplica: 8}
  inference: {replicas: 4, gpusPerReplica: 1}
  storage: {claimTemplate: {accessModes: [ReadWriteOnce]}}
"""
)


def test_gpus_without_a_place_are_notes(capsys: pytest.CaptureFixture[str]) -> None:
    def notes(text: str) -> str:
        Path("run.yaml").write_text(text)
        assert main(["validate", "run.yaml"]) == 0
        return capsys.readouterr().out

    note = "note: spec.storage.claimTemplate.accessModes (ReadWriteOnce) puts all pods on one node, which needs 20 GPUs"
    assert note in notes(ONE_NODE)
    assert "puts all pods" not in notes(ONE_NODE.replace("replicas: 2, gpusPerReplica: 8", "gpusPerReplica: 4"))
    forgotten = ONE_NODE.replace("replicas: 2, gpusPerReplica: 8", "replicas: 2")
    note = (
        "note: spec.trainer.gpusPerReplica is 0, so the trainer pods compute on CPUs, but inference.gpusPerReplica is 1"
    )
    assert note in notes(forgotten)
    assert "compute on CPUs" not in notes(OF_A_HUB)
