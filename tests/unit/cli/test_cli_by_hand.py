"""Roles of files written by hand: what they may leave out, what they are asked for, and one identity for all roles of a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.cli.role_commands import MODELS, load_role, prepare
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import claim_identity, complete_role_file
from rlrun.protocol.files.paths import Role, RunPaths

ROOT = Path(__file__).parents[3]
KEY = {"RLRUN_API_KEY": "secret"}
FILES: dict[Role, str] = {
    "inference": '[model]\nname = "org/model"\n',
    "trainer": '[model]\nname = "org/model"\n[optimizer]\nlr = 1e-5\n',
    "orchestrator": '[model]\nname = "org/model"\n[[environments]]\nid = "reverse-text"\n',
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of all terminals."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(role: Role, text: str, *options: str) -> RoleConfig:
    """The configuration that a role's process gets of a file."""
    Path(f"{role}.toml").write_text(text)
    command, _ = prepare(role, ["@", f"{role}.toml", *options], KEY)
    return load_file(MODELS[role], Path(command[command.index("--config") + 1]), section=role)


def test_three_files_are_one_run_with_a_manifests_defaults(here: Path) -> None:
    found = [started(role, text) for role, text in FILES.items()]
    inference, trainer, orchestrator = found
    assert {(role.name, role.output_dir) for role in found} == {("rl", str(here / "runs" / "rl"))}
    assert len({role.uid for role in found}) == 1
    spec = RLRunSpec.model_validate({"model": {"name": "org/model"}, "environments": [{"id": "reverse-text"}]})
    for role in found:
        assert (role.max_steps, role.seq_len, role.seed) == (spec.max_steps, spec.seq_len, spec.seed)
    assert isinstance(inference, InferenceConfig)
    assert inference.max_model_len == spec.seq_len
    assert isinstance(trainer, TrainerConfig)
    assert (trainer.micro_batch_tokens, trainer.optimizer.lr, trainer.algorithm) == (4096, 1e-5, spec.algorithm)
    assert isinstance(orchestrator, OrchestratorConfig)
    assert (orchestrator.sampling, orchestrator.checkpoint) == (spec.sampling, spec.checkpoint)
    assert f"http://127.0.0.1:{inference.port}" in orchestrator.inference_urls
    assert orchestrator.trainer_url == f"http://127.0.0.1:{trainer.port}"


def test_the_files_of_the_page_are_taken() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    files = dict(re.findall(r"```toml\n# (inference|trainer|orchestrator)\.toml\n(.*?)```", page, re.DOTALL))
    assert files.keys() == MODELS.keys()
    found = [started(role, files[role]) for role in MODELS]
    assert len({(role.uid, role.model, role.seq_len) for role in found}) == 1
    (more,) = re.findall(r"```toml\n# orchestrator\.toml, beside.*?\n(.*?)```", page, re.DOTALL)
    assert isinstance(config := started("orchestrator", more + files["orchestrator"]), OrchestratorConfig)
    assert config.trainer_url == "http://gpu-1:29600"


def test_a_folder_has_one_uid_and_a_name_of_its_own(here: Path) -> None:
    one = started("inference", FILES["inference"], "--output-dir", "My_Run 7")
    assert one.name == "my-run-7"
    assert json.loads((here / "My_Run 7" / "identity.json").read_text()) == {"name": one.name, "uid": one.uid}
    again = started("trainer", FILES["trainer"], "--output-dir", "My_Run 7", "--name", one.name)
    assert again.uid == one.uid
    assert started("trainer", FILES["trainer"]).uid != one.uid
    with pytest.raises(ConfigError, match=r"command line: --name: got 'x', but the run in .*My_Run 7 is 'my-run-7'"):
        started("trainer", FILES["trainer"], "--output-dir", "My_Run 7", "--name", "x")


def test_all_that_has_no_default_is_asked_for_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        started("orchestrator", "batch_size = 8\n")
    assert str(error.value) == (
        "orchestrator.toml: model, environments: required, but not set, and without a default; add for example "
        '`model = {name = "Qwen/Qwen3-0.6B"}` and `environments = [{id = "reverse-text", group_size = 8}]`'
    )
    with pytest.raises(ConfigError, match=r"trainer\.toml: model: required") as error:
        started("trainer", "lr = 1\n")
    assert len(error.value.problems) == 2, "what is wrong besides is in the same round"
    with pytest.raises(ConfigError, match=r"orchestrator\.toml: data: required"):
        started("orchestrator", 'task = "SFT"\n[model]\nname = "org/model"\n')


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        (
            "orchestrator",
            ["--batch-size", "12"],
            r"batch_size: got 12, not divisible by environments\[0\]\.group_size \(8\); .* = 16",
        ),
        (
            "trainer",
            ["--model", '{"name": null, "tiny": {}}'],
            r"model\.tiny: there is no folder .*runs/rl/model: .*`rlrun tiny-model ",
        ),
    ],
)
def test_what_no_role_can_do_alone_is_refused_before_it_starts(
    here: Path, role: Role, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        started(role, FILES[role], *options)
    assert not (here / "runs").exists()


def test_nothing_is_written_before_all_is_right(here: Path) -> None:
    for text in ("seed = -1\n", FILES["trainer"] + "wrong = 1\n"):
        with pytest.raises(ConfigError):
            started("trainer", text)
    with pytest.raises(SystemExit):
        started("trainer", FILES["trainer"], "--dry-run")
    assert not (here / "runs").exists()


def test_the_file_is_read_alike_by_a_rank_that_torchrun_starts(here: Path) -> None:
    file = here / "trainer.toml"
    file.write_text(FILES["trainer"])
    ranks = [
        claim_identity(load_file(TrainerConfig, file, section="trainer", complete=complete_role_file)) for _ in range(2)
    ]
    assert ranks[0] == ranks[1] == started("trainer", FILES["trainer"])


def test_a_damaged_record_of_the_run_is_named(here: Path) -> None:
    paths = RunPaths(here / "runs" / "rl")
    paths.root.mkdir(parents=True)
    paths.identity.write_text("{")
    with pytest.raises(RoleError, match=r"identity\.json is damaged; remove it"):
        started("trainer", FILES["trainer"])


def test_a_whole_file_is_handed_on_as_it_is(here: Path) -> None:
    whole = {"name": "r", "uid": "u", "output_dir": str(here / "out")}
    config = started("inference", FILES["inference"], *(f"--{k.replace('_', '-')}={v}" for k, v in whole.items()))
    assert (config.name, config.uid, config.output_dir) == ("r", "u", str(here / "out"))
    assert not (here / "out" / "identity.json").exists()


@pytest.mark.parametrize(
    "example",
    sorted((ROOT / "examples").glob("*.yaml")) + sorted((ROOT / "examples" / "models").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_files_of_a_launcher_are_taken_as_they_are(example: Path, here: Path) -> None:
    """One that was changed would have another fingerprint than the run that it is of."""
    run, _ = parse_manifest(example.read_text(), str(example))
    config = resolve_spec(run.spec, name=run.metadata.name, uid="uid", output_dir=str(here / "run"))
    file = here / "run.json"
    file.write_text(config.model_dump_json())
    for role, model in MODELS.items():
        if (rendered := getattr(config, role)) is not None:
            assert load_file(model, file, section=role, complete=complete_role_file) == rendered


@pytest.mark.parametrize("role", MODELS)
def test_the_help_page_requires_what_a_file_by_hand_must_say(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_role(role, MODELS[role], ["--help"], {})
    page = capsys.readouterr().out
    options = dict(re.findall(r"^  --([a-z-]+) VALUE\n((?:      .*\n)+)", page, re.MULTILINE))
    assert {"name", "uid", "max-steps"} <= options.keys()
    assert [name for name, text in options.items() if "required" in text] == []
    assert "--model (required)" in page
    for line in ("default: the name in output_dir, or rl", "default: runs/<name>", "default: 2048", "default: 100"):
        assert line in page


def test_a_mistyped_option_of_the_trainer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--replya: unknown option \(did you mean --replay\?\)"):
        load_role("trainer", TrainerConfig, ["--replya", "x"], {})
