"""Configuration loader: precedence, spellings, and problems with place, value and fix."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.arguments import parse_environment
from rlrun.config.loading.loader import ConfigError, load_file, load_model
from rlrun.config.loading.options import PROCESS_VARIABLES
from rlrun.config.models.roles import TrainerConfig

BASE = ["--model.path", "m", "--environments.0.id", "arithmetic"]


def loaded(*argv: str, env: dict[str, str] | None = None) -> RLRunSpec:
    return load_model(RLRunSpec, argv, env=env or {}, prog="test")


def problems(*argv: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        loaded(*argv, env=env)
    assert str(error.value) == "\n".join(str(problem) for problem in error.value.problems)
    return str(error.value).splitlines()


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "a.toml") -> str:
        Path(name).write_text(text)
        return name

    return write


def test_command_line_beats_files_beat_environment_beats_defaults(toml: Any) -> None:
    a = toml("max_steps = 3\nseed = 3\nseq_len = 1003\n", "a.toml")
    b = toml("maxSteps: 4\nseed: 4\n", "b.yaml")
    env = {"RLRUN_MAX_STEPS": "2", "RLRUN_SEED": "2", "RLRUN_SEQ_LEN": "1002", "RLRUN_CHECKPOINT__INTERVAL": "2"}
    spec = loaded(*BASE, "@", a, "@", b, "--max-steps", "5", env=env)
    assert (spec.max_steps, spec.seed, spec.seq_len, spec.checkpoint.interval) == (5, 4, 1003, 2)
    assert spec.checkpoint.keep_last == 3


def test_files_merge_deeply_and_lists_are_replaced(toml: Any) -> None:
    a = toml('[trainer.optimizer]\nlr = 1e-3\nbeta1 = 0.5\n[[environments]]\nid = "x"\n[[environments]]\nid = "y"\n')
    b = toml(json.dumps({"trainer": {"optimizer": {"lr": 1e-4}}, "environments": [{"id": "z"}]}), "b.json")
    spec = loaded("--model.path", "m", "@", a, "@", b)
    assert (spec.trainer.optimizer.lr, spec.trainer.optimizer.beta1) == (1e-4, 0.5)
    assert [environment.id for environment in spec.environments] == ["z"]


def test_order_of_options_and_files_is_irrelevant(toml: Any) -> None:
    assert loaded("--max-steps", "5", "@", toml("max_steps = 3\n"), *BASE).max_steps == 5


@pytest.mark.parametrize("option", ["--trainer.optimizer.weight-decay", "--trainer.optimizer.weight_decay"])
def test_kebab_and_snake(option: str) -> None:
    assert loaded(*BASE, option, "0.1").trainer.optimizer.weight_decay == 0.1


def test_camel_and_the_equals_sign() -> None:
    assert loaded(*BASE, "--trainer.optimizer.weightDecay=0.1").trainer.optimizer.weight_decay == 0.1


def test_switches_turn_on_and_off() -> None:
    assert loaded(*BASE, "--orchestrator.record-rollouts").orchestrator.record_rollouts
    assert loaded(*BASE, "--orchestrator.record-rollouts", "true", "--seed", "1").seed == 1
    assert not loaded(*BASE, "--no-checkpoint.enabled").checkpoint.enabled
    assert not loaded(*BASE, "--checkpoint.no-enabled").checkpoint.enabled
    assert not loaded(*BASE, "--checkpoint.enabled=false").checkpoint.enabled


def test_optional_block_is_switched_on_and_off(toml: Any) -> None:
    assert loaded(*BASE, "--evaluation").evaluation is not None
    file = toml("[evaluation]\ninterval = 5\n")
    assert loaded(*BASE, "@", file, "--evaluation").evaluation.interval == 5  # type: ignore[union-attr]
    assert loaded(*BASE, "@", file, "--no-evaluation").evaluation is None
    assert loaded(*BASE, "@", file, "--evaluation", "null").evaluation is None


def test_lists_by_index_and_as_json(toml: Any) -> None:
    file = toml('[[environments]]\nid = "x"\ngroup_size = 2\n')
    spec = loaded(
        "--model.path=m", "@", file, "--environments.0.group-size", "4", "--environments.1.id", "y"
    )  # fmt: skip
    assert [(e.id, e.group_size) for e in spec.environments] == [("x", 4), ("y", 8)]
    spec = loaded("--model.path=m", "--environments", '[{"id": "z", "groupSize": 2}]')
    assert [(e.id, e.group_size) for e in spec.environments] == [("z", 2)]
    assert loaded(*BASE, "--inference.extra-args.0=--foo=1").inference.extra_args == ["--foo=1"]


def test_free_mapping_keeps_keys_and_reads_json_values() -> None:
    spec = loaded(*BASE, "--environments.0.args.max_len", "3", "--environments.0.args.someWord", "abc")
    assert spec.environments[0].args == {"max_len": 3, "someWord": "abc"}


def test_negative_numbers_are_values_and_not_options() -> None:
    assert problems(*BASE, "--seed", "-1") == [
        "command line: --seed: got -1, expected a whole number of at least 0 and less than 2147483648"
    ]


def test_string_field_accepts_number_as_text() -> None:
    assert loaded("--model.name", "123", *BASE[2:]).model.name == "123"


def test_problems_of_all_sources_are_reported_together(toml: Any) -> None:
    file = toml('seed = "one"\n[trainer]\noptmizer = 1\n[trainer.optimizer]\nlr = "fast"\n')
    found = problems(
        "@", file, *BASE, "--max-stpes", "3", "--checkpoint.interval=0",
        env={"RLRUN_SEQ_LEN": "x", "PRIME_MODLE__NAME": "y"},
    )  # fmt: skip
    assert sorted(found) == sorted(
        [
            "a.toml:3: trainer.optmizer: unknown field (did you mean optimizer?)",
            'a.toml:5: trainer.optimizer.lr: got "fast" (a string), expected a number greater than 0 and at most 10',
            'a.toml:1: seed: got "one" (a string), expected a whole number of at least 0 and less than 2147483648',
            "command line: --max-stpes: unknown option (did you mean --max-steps?)",
            "command line: --checkpoint.interval: got 0, expected a whole number of at least 1",
            'environment: RLRUN_SEQ_LEN: got "x" (a string), expected a whole number from 16 to 16777216',
            "environment: PRIME_MODLE__NAME: unknown field (did you mean PRIME_MODEL__NAME?)",
        ]
    )


def test_misplaced_option_gets_correct_name() -> None:
    assert problems(*BASE, "--beta1", "1") == [
        "command line: --beta1: unknown option (did you mean --trainer.optimizer.beta1?)"
    ]
    assert problems(*BASE, "--lr", "1") == [
        "command line: --lr: unknown option (did you mean algorithm.critic.lr or trainer.optimizer.lr?)"
    ]


def test_file_after_at_sign_needs_space() -> None:
    assert problems(*BASE, "@a.toml") == ['command line: @a.toml: write "@ a.toml" with a space']


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["@"], "command line: @: needs a file after it"),
        (["--seed"], "command line: --seed: needs a value"),
        (["--seed", "--max-steps", "3"], "command line: --seed: needs a value"),
        (
            ["stray"],
            'command line: stray: is not an option; options start with "--", and a file is written as "@ FILE"',
        ),
        (
            ["--environments.3.id", "x"],
            "command line: --environments.3.id: item 3 does not exist; the next index is 1",
        ),
        (["--environments.x.id", "x"], "'x' is not an index of a list"),
        (["--seed.x", "1"], "command line: --seed.x: unknown option: seed has no fields"),
        (["@", "none.toml"], "none.toml: no such file"),
        (["@", "x.ini"], "x.ini: unknown format '.ini'; known: .toml, .yaml, .yml, .json"),
        (["@", "."], "has no suffix"),
        (["--dryrun"], "(did you mean --dry-run?)"),
    ],
)
def test_unreadable_command_line_is_refused(argv: list[str], message: str) -> None:
    assert any(message in line for line in problems(*BASE, *argv))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "seed = 1\nseed = 2\n", "a.toml:2: not TOML: duplicate key 'seed'; remove one"),
        ("a.toml", "seed = \n", "a.toml:1: not TOML: Invalid value (column 8)"),
        ("a.yaml", "seed: 1\nmodel: {a: [}\n", "a.yaml:2: not YAML"),
        ("a.yaml", "seed: 1\nseed: 2\n", "a.yaml:2: duplicate key 'seed': it is already set in line 1; remove one"),
        ("a.yaml", "seed: 1\n---\nseed: 2\n", "a.yaml: 2 YAML documents, expected one; split the file"),
        ("a.yaml", "- 1\n", "a.yaml: contains no mapping of fields at the top"),
        ("a.json", '{"seed": 1,\n}', "a.json:2: not JSON"),
        ("a.json", '{"seed": 1, "seed": 2}', "a.json: not JSON: duplicate key 'seed'; remove one"),
        ("a.json", "[" * 100_000, "a.json: not JSON"),
        ("a.yaml", "[" * 5_000, "a.yaml:1: more than 100 nested lists and mappings; flatten it"),
        ("a.toml", "seed = " + "9" * 5_000, "a.toml: not TOML"),
    ],
)
def test_broken_file_is_refused(toml: Any, name: str, text: str, message: str) -> None:
    assert any(message in line for line in problems(*BASE, "@", toml(text, name)))


def test_binary_file_is_refused(toml: Any) -> None:
    file = toml("")
    Path(file).write_bytes(b"\xff\xfe\x00")
    assert problems("@", file) == ["a.toml: not UTF-8 text (byte 0); save it as UTF-8"]


def test_duplicate_spellings_of_field_are_refused(toml: Any) -> None:
    assert problems(*BASE, "@", toml("max_steps = 1\nmax-steps = 2\n")) == [
        "a.toml:2: max-steps: set twice, also as max_steps; remove one"
    ]


def test_variables_of_other_programs_are_ignored() -> None:
    env = {"RLRUN_API_KEY": "k", "RLRUN_ATTEMPT": "2", "RLRUN_LAUNCH_ID": "x", "PRIME_API_KEY": "x", "MAX_STEPS": "9"}
    assert loaded(*BASE, env=env) == loaded(*BASE)


def test_unknown_rlrun_variable_is_reported_except_process_variables() -> None:
    env = {"RLRUN_MAXSTEPS": "2", "RLRUN_POD_NAME": "p", "RLRUN_FOO_SERVICE_HOST": "h", "RLRUN_FOO_PORT_80_TCP": "t"}
    [notice] = parse_environment(RLRunSpec, env).layer.notices
    assert (
        str(notice)
        == "environment: RLRUN_MAXSTEPS: is not a known variable and has no effect (did you mean RLRUN_MAX_STEPS?)"
    )


def test_process_variable_table_is_complete() -> None:
    root = Path(__file__).parents[3]
    files = [
        file for part in ("workloads", "operator", "charts") for file in (root / part).rglob("*") if file.is_file()
    ]
    text = "\n".join(
        file.read_text() for file in files if file.suffix in (".py", ".yaml") and file.name != "variables.py"
    )
    named = set(re.findall(r"\bRLRUN_[A-Z]+(?:_[A-Z]+)*\b(?!_)", text))
    fields = {f"RLRUN_{name.upper()}" for name in RLRunSpec.model_fields}
    assert named - fields == set(PROCESS_VARIABLES)
    assert not fields & set(PROCESS_VARIABLES)


def test_variables_with_both_prefixes_are_read() -> None:
    assert loaded(*BASE, env={"PRIME_MAX_STEPS": "7"}).max_steps == 7
    assert loaded(*BASE, env={"PRIME_MAX_STEPS": "7", "RLRUN_MAX_STEPS": "8"}).max_steps == 8
    env = {"RLRUN_MODEL__PATH": "m", "RLRUN_ENVIRONMENTS__0__ID": "x", "RLRUN_ENVIRONMENTS__0__GROUP_SIZE": "4"}
    assert loaded(env=env).environments[0].group_size == 4


def test_missing_field_error_describes_field(toml: Any) -> None:
    assert problems("--model.path=m") == [
        "configuration: environments is empty, but task RL needs at least one; add an environment"
    ]
    assert problems("--model.path=m", "@", toml("[[environments]]\nratio = 2.0\n")) == [
        "a.toml:1: environments[0].id: required, but not set: A built-in environment (`reverse-text`, `gsm8k`, ...), "
        "`verifiers:<name>`, or `package.module:function`"
    ]


def test_rule_violation_points_to_a_set_field(toml: Any) -> None:
    found = problems("--model.path=m", "@", toml('[[environments]]\nid = "x"\ngroup_size = 7\n'))
    assert found == [
        "a.toml:3: orchestrator.batchSize (64) must be divisible by environments[0].groupSize (7); set batchSize to 63 or 70"
    ]


def test_values_of_the_wrong_kind_are_not_converted(toml: Any) -> None:
    found = problems(*BASE, "@", toml('max_steps = "5"\nseed = 1.5\ncheckpoint = 3\ntrainer = {replicas = true}\n'))
    assert [line.partition(", expected")[0] for line in found] == [
        'a.toml:1: max_steps: got "5" (a string)',
        "a.toml:2: seed: got 1.5 (a number)",
        "a.toml:3: checkpoint: got 3 (a number)",
        "a.toml:4: trainer.replicas: got true",
    ]


def test_enumeration_error_suggests_value() -> None:
    assert problems(*BASE, "--checkpoint.resume.policy", "latest") == [
        'command line: --checkpoint.resume.policy: got "latest" (a string), expected "Latest", "Never" or "Step"; '
        "write --checkpoint.resume.policy Latest"
    ]


def test_model_name_is_replaced_by_other_source(toml: Any) -> None:
    file = toml("[model.tiny]\n")
    assert "got path and tiny" in problems(*BASE, "@", file)[0]
    assert loaded(*BASE, "@", file, "--no-model.tiny").model.path == "m"


def test_problems_stay_on_one_line(toml: Any) -> None:
    assert len(problems(*BASE, "@", toml('"a\\nb\\u001b" = 1\n'))) == 1


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        loaded("--help")
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "--trainer.optimizer.lr VALUE" in text
    assert "Peak learning rate. [a number greater than 0 and at most 10; default: 1e-06]" in text
    assert "--no-checkpoint.enabled" in text
    assert "--environments.N.group-size" in text
    assert "--environments.N.id VALUE" in text


def test_dry_run_output_can_be_loaded(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        loaded(*BASE, "--max-steps", "3", "--dry-run")
    assert end.value.code == 0
    file = toml(capsys.readouterr().out, "resolved.json")
    assert loaded("@", file) == loaded(*BASE, "--max-steps", "3")


def test_role_loads_its_section_of_combined_file(toml: Any) -> None:
    role = {
        "name": "r", "uid": "u", "output_dir": "o", "model": {"path": "m"}, "max_steps": 1, "seq_len": 64, "seed": 0,
        "algorithm": {}, "checkpoint": {},
    }  # fmt: skip
    whole = toml(json.dumps({"format_version": 1, "trainer": role, "inference": {"junk": 1}}), "run.json")
    own = toml(json.dumps(role), "own.json")
    assert load_file(TrainerConfig, Path(whole), section="trainer") == load_file(
        TrainerConfig, Path(own), section="trainer"
    )
    changed = load_model(
        TrainerConfig, ["@", whole, "--optimizer.lr", "0.5"], env={}, prog="trainer", section="trainer"
    )
    assert changed.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ((), {}, "configuration: --model"),
        (("--environments.0.ratio", "2"), {}, "command line: --environments.0.id"),
        (("--environments", '[{"ratio": 2.0}]'), {}, "command line: --environments[0].id"),
        (("--algorithm.loss.options.x", "1"), {}, "command line: --algorithm.loss.name"),
        (("--inference.autoscale.min", "1"), {}, "command line: --inference.autoscale.max"),
        ((), {"RLRUN_ENVIRONMENTS__0__RATIO": "2"}, "environment: RLRUN_ENVIRONMENTS__0__ID"),
        ((), {"RLRUN_ALGORITHM__LOSS__OPTIONS": "{}"}, "environment: RLRUN_ALGORITHM__LOSS__NAME"),
    ],
)
def test_missing_field_is_reported_with_place(words: Sequence[str], variables: dict[str, str], said: str) -> None:
    assert f"{said}: required, but not set" in "\n".join(problems(*words, env=variables))


def test_missing_fields_of_blocks_of_a_file(toml: Any) -> None:
    text = (
        "[model]\npath = 'm'\n[[environments]]\nid = 'x'\n[environments.curriculum.easy]\ntrain = false\n"
        "[algorithm.loss.options]\nx = 1\n[inference.spot]\n[budget]\n[[failure_policy.rules]]\nname = 'a'\n"
        "[tracking.wandb.secret_ref]\n[[trainer.env]]\nname = 'A'\n[trainer.env.value_from.secret_key_ref]\nkey = 'k'\n"
    )
    found = [problem.partition(": required")[0] for problem in problems("@", toml(text)) if "required" in problem]
    assert found == [
        "a.toml:5: environments[0].curriculum.easy.threshold",
        "a.toml:7: algorithm.loss.name",
        "a.toml:9: inference.spot.share",
        "a.toml:9: inference.spot.node_selector",
        "a.toml:10: budget.gpu_hours",
        "a.toml:11: failure_policy.rules[0].action",
        "a.toml:13: tracking.wandb.secret_ref.name",
        "a.toml:16: trainer.env[0].value_from.secret_key_ref.name",
    ]
