"""Conversion of PRIME-RL TOML files to an equivalent manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.run_manifest import parse_manifest
from rlrun.cli.convert import run
from rlrun.cli.convert_toml import convert_toml
from rlrun.cli.run_layers import read_layer
from rlrun.config.loading.examine import examine_layer
from rlrun.config.loading.problems import ConfigError
from rlrun.local.judge import judge_manifest
from rlrun.runtime import exit_codes
from tools.docs_prime_rl import RUNS
from tools.prime_rl_files import as_toml, files

FILES = [file for file in files() if file.command in RUNS]
UID = "00000000-0000-0000-0000-000000000000"
BASE = """max_steps = 20
[model]
name = "a/b"
[log]
level = "debug"
[orchestrator]
batch_size = 128
rollouts_per_example = 16
seq_len = 512
[orchestrator.sampling]
max_tokens = 4096
[[orchestrator.env]]
id = "owner/words@1.2"
args = {n = 3}
[[orchestrator.env]]
id = "sums"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "f.toml") -> str:
    Path(name).write_text(text)
    return name


def roles(spec: Any) -> dict[str, Any]:
    return resolve_spec(spec, name="x", uid=UID, output_dir="/x").model_dump(mode="json")


def test_prime_rl_file_equals_its_command_or_is_refused() -> None:
    converted = 0
    for file in FILES:
        path = write(as_toml(file.document))
        examined = examine_layer(model := RUNS[file.command], read_layer(["@", path], {}, model).layer)
        if examined.problems or examined.result is None:
            with pytest.raises(ConfigError) as refused:
                convert_toml([file.command, "@", path])
            assert refused.value.problems == examined.problems, file.path
            continue
        if "fake" in str(file.document.get("data")):
            continue
        found = convert_toml([path])  # the command depends on the keys
        manifest = parse_manifest(found.text, "run.yaml")[0]
        assert roles(manifest.spec) == roles(examined.result.spec()), file.path
        keys = [fate.setting.key for fate in found.fates]
        assert [one for one in file.keys if not any(one.startswith(key) or key.startswith(one) for key in keys)] == []
        assert {fate.kind for fate in found.fates} <= {"taken", "mapped", "default", "dropped"}
        for fate in found.fates:
            assert fate.setting.key in found.text, (file.path, fate)
            assert fate.to or fate.note, (file.path, fate)
        converted += 1
    assert converted >= 45


def test_comments_name_source_key_and_unused_keys() -> None:
    later = write("max_steps = 5\n[trainer.scheduler]\ntype = 'cosine'\n", "b.toml")
    found = convert_toml(["rl", "@", write(BASE), "@", later, "trainer.optim.lr=1e-5", "--seed", "3"])
    lines = found.text.splitlines()
    for expected in (
        "  maxSteps: 5  # b.toml: max_steps=5",
        "  seed: 3  # --seed=3",
        '  - {id: verifiers:words, args: {n: 3}, groupSize: 16}  # f.toml: orchestrator.rollouts_per_example=16, f.toml: '
        'orchestrator.env[0].id=owner/words@1.2, f.toml: orchestrator.env[0].args={"n": 3}',
        "    maxTokens: 511  # f.toml: orchestrator.sampling.max_tokens=4096",
        "      lr: 1.0e-05  # --trainer.optim.lr=1e-5",
        "      name: cosine  # b.toml: trainer.scheduler.type=cosine",
        "#   f.toml: max_steps=20: dropped: max_steps of b.toml overrides it",
    ):  # fmt: skip
        assert expected in lines
    assert any(
        line.startswith('#   f.toml: log={"level": "debug"}: dropped: every role writes its log') for line in lines
    )
    assert any("lowered to 511" in notice for notice in found.notices)
    assert any("set no GPUs" in notice for notice in found.notices)


def test_role_files_form_one_run_only_together() -> None:
    trainer = write("[optim]\nlr = 0.5\n[model]\nname = 'a/b'\n", "t.toml")
    orchestrator = write("batch_size = 8\n[[env]]\nid = 'x'\n", "o.toml")
    found = convert_toml(["rl", "--trainer", "@", trainer, "--orchestrator", "@", orchestrator, "--name", "words"])
    manifest = parse_manifest(found.text, "r")[0]
    assert (manifest.metadata.name, manifest.spec.trainer.optimizer.lr, manifest.spec.orchestrator.batch_size) == (
        "words",
        0.5,
        8,
    )
    for words in ([orchestrator], ["orchestrator", "@", orchestrator]):
        with pytest.raises(
            ConfigError,
            match=r"the file of the orchestrator does not describe a whole run.*--trainer @ FILE --inference @ FILE",
        ):
            convert_toml(words)


def test_file_without_real_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="a run on fake data only measures speed"):
        convert_toml([write("[model]\nname = 'a/b'\n[data]\ntype = 'fake'\n")])
    assert run([write(BASE + "[trainer.optim]\ntype = 'lion'\n"), "-o", "run.yaml"]) == exit_codes.CONFIGURATION
    assert (
        "f.toml:18: trainer.optim.type: got 'lion'; not supported here; known: adamw, muon, sgd"
        in capsys.readouterr().err
    )
    assert not Path("run.yaml").exists()
    assert run([write(BASE), "--rows", "3"]) == exit_codes.USAGE
    assert "--rows: PRIME-RL's files contain the number of steps" in capsys.readouterr().err
    assert run([write(BASE), "--outputt", "x"]) != exit_codes.OK
    assert "outputt" in capsys.readouterr().err


def test_our_names_and_the_folder_are_kept_apart() -> None:
    found = convert_toml([write("output_dir = 'out'\nmax_steps = 3\n[model]\npath = 'm'\n[failure_policy]\nmax_restarts = 2\n"
                                "[[environments]]\nid = 'reverse-text'\ngroup_size = 4\n[checkpoint]\ninterval = 2\n")])  # fmt: skip
    manifest = parse_manifest(found.text, "r")[0]
    assert (manifest.spec.failure_policy.max_restarts, manifest.spec.checkpoint.interval) == (2, 2)
    assert "#   output_dir=out: dropped: the run's folder is <storage.mountPath>/<name>" in found.text
    assert manifest.spec.environments[0].group_size == 4


def test_toml_manifest_error_recommends_convert_command() -> None:
    judged = judge_manifest(BASE, "f.toml", here=False)
    (problem,) = judged.problems
    assert str(problem).startswith(
        "f.toml: is TOML, but a manifest is YAML: `rlrun convert f.toml -o run.yaml` converts"
    )


RENDERED = """max_steps = 20
[model]
name = "a/b"
[orchestrator]
batch_size = 16
max_inflight_episodes = 7
[orchestrator.renderer]
name = "qwen3"
enable_thinking = true
[[orchestrator.train.env]]
id = "reverse-text"
"""


@pytest.mark.parametrize("evaluation", ["", "[orchestrator.eval]\n[orchestrator.eval.sampling]\nmax_tokens = 9\n"])
def test_renderer_thinking_sets_chat_template_argument(evaluation: str) -> None:
    spec = parse_manifest(convert_toml([write(RENDERED + evaluation)]).text, "test")[0].spec
    assert spec.sampling.chat_template_arguments == {"enable_thinking": True}
    if evaluation:
        assert spec.evaluation is not None
        assert spec.evaluation.sampling is not None
        assert spec.evaluation.sampling.chat_template_arguments == {"enable_thinking": True}


def test_episodes_in_flight_are_the_concurrency() -> None:
    spec = parse_manifest(convert_toml([write(RENDERED)]).text, "test")[0].spec
    assert spec.orchestrator.max_concurrency == 7


@pytest.mark.parametrize("steps", ["", "max_steps = 20\n"])
def test_missing_number_of_steps_is_reported_with_the_default(steps: str) -> None:
    converted = convert_toml([write(RENDERED.replace("max_steps = 20\n", steps))])
    spec = parse_manifest(converted.text, "test")[0].spec
    reported = [notice for notice in converted.notices if "max_steps" in str(notice)]
    assert bool(reported) is not bool(steps)
    assert steps or f"{spec.max_steps} steps" in str(reported[0])


def test_unknown_keys_are_reported_for_rl_file() -> None:
    unknown = write(BASE + "a1 = 1\n[trainer]\nb1 = 1\nb2 = 1\nb3 = 1\n[orchestrator.train]\nc1 = 1\n", "unknown.toml")
    with pytest.raises(ConfigError) as refused:
        convert_toml([unknown])
    assert "no run" not in str(refused.value)
    assert "orchestrator.train.c1: unknown field" in str(refused.value)
    part = write("batch_size = 2\nb1 = 1\nb2 = 1\n[model.client]\nb3 = 1\n[[train.env]]\nname = 'x'\n", "part.toml")
    with pytest.raises(ConfigError, match="the file of the orchestrator does not describe a whole run"):
        convert_toml([part])


@pytest.mark.parametrize("kind", ["rae", "sft", "gae"])
def test_part_with_unsupported_algorithm_names_only_algorithm(kind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        convert_toml([write(f"[orchestrator.train.algo]\ntype = '{kind}'\n")])
    assert [one.path for one in refused.value.problems] == ["orchestrator.train.algo.type"]


def test_zero_advantage_gate_becomes_filter() -> None:
    source = "[[orchestrator.train.source]]\nname = 'a'\nenv.taskset.id = 'b'\n"
    gate = "curriculum = {{ gates = {{ low = {{ type = 'advantage_range'{} }} }} }}\n"
    found = convert_toml([write(source + gate.format(""))])
    assert "zeroVariance: true  # orchestrator.train.source[0].curriculum.gates=" in found.text
    for text in (gate.format(", reject_max = 0.05"), "curriculum = { sampler = { type = 'difficulty_pool' } }\n"):
        with pytest.raises(ConfigError, match=r"curriculum\.(gates|sampler): .*(zeroVariance|curriculum\.easy)"):
            convert_toml([write(source + text)])


def test_batch_and_group_that_no_file_names_are_theirs() -> None:
    source = "[[orchestrator.train.source]]\nname = 'a'\nenv.taskset.id = 'b'\n"
    found = convert_toml([write(source + source.replace("'a'", "'c'") + "group_size = 4\n")])
    spec = parse_manifest(found.text, "r")[0].spec
    assert (spec.orchestrator.batch_size, [one.group_size for one in spec.environments]) == (128, [1, 4])
    assert any("orchestrator.batch_size 128, " in one and "group_size 1" in one for one in found.notices)
    own = convert_toml([write("[orchestrator]\nbatch_size = 16\n[orchestrator.train]\ngroup_size = 2\n" + source)])
    spec = parse_manifest(own.text, "r")[0].spec
    assert (spec.orchestrator.batch_size, spec.environments[0].group_size) == (16, 2)
