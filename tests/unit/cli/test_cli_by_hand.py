"""Handwritten role files: optional fields, required fields, and one identity for all roles of a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.cli.role_commands import MODELS, load_role, prepare_process
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
    """Set the working directory of all terminals."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare_role(role: Role, text: str, *options: str) -> RoleConfig:
    """Return the configuration that the process of a role receives for a file."""
    Path(f"{role}.toml").write_text(text)
    command, _ = prepare_process(role, ["@", f"{role}.toml", *options], KEY)
    return load_file(MODELS[role], Path(command[command.index("--config") + 1]), section=role)


def test_three_files_are_one_run_with_a_manifests_defaults(here: Path) -> None:
    found = [prepare_role(role, text) for role, text in FILES.items()]
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


def test_documented_role_files_are_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    files = dict(re.findall(r"```toml\n# (inference|trainer|orchestrator)\.toml\n(.*?)```", page, re.DOTALL))
    assert files.keys() == MODELS.keys()
    found = [prepare_role(role, files[role]) for role in MODELS]
    assert len({(role.uid, role.model, role.seq_len) for role in found}) == 1
    (more,) = re.findall(r"```toml\n# orchestrator\.toml, beside.*?\n(.*?)```", page, re.DOTALL)
    assert isinstance(config := prepare_role("orchestrator", more + files["orchestrator"]), OrchestratorConfig)
    assert config.trainer_url == "http://gpu-1:29600"


def test_run_folder_has_one_uid_and_name(here: Path) -> None:
    one = prepare_role("inference", FILES["inference"], "--output-dir", "My_Run 7")
    assert one.name == "my-run-7"
    assert json.loads((here / "My_Run 7" / "identity.json").read_text()) == {"name": one.name, "uid": one.uid}
    again = prepare_role("trainer", FILES["trainer"], "--output-dir", "My_Run 7", "--name", one.name)
    assert again.uid == one.uid
    assert prepare_role("trainer", FILES["trainer"]).uid != one.uid
    with pytest.raises(ConfigError, match=r"command line: --name: got 'x', but the run in .*My_Run 7 is 'my-run-7'"):
        prepare_role("trainer", FILES["trainer"], "--output-dir", "My_Run 7", "--name", "x")


def test_missing_required_fields_are_listed_on_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        prepare_role("orchestrator", "batch_size = 8\n")
    assert str(error.value) == (
        "orchestrator.toml: model, environments: required, but not set, and without a default; add for example "
        '`model = {name = "Qwen/Qwen3-0.6B"}` and `environments = [{id = "reverse-text", group_size = 8}]`'
    )
    with pytest.raises(ConfigError, match=r"trainer\.toml: model: required") as error:
        prepare_role("trainer", "lr = 1\n")
    assert len(error.value.problems) == 2, "what is wrong besides is in the same round"
    with pytest.raises(ConfigError, match=r"orchestrator\.toml: data: required"):
        prepare_role("orchestrator", 'task = "SFT"\n[model]\nname = "org/model"\n')


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
def test_single_role_conflict_is_refused_before_start(here: Path, role: Role, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_role(role, FILES[role], *options)
    assert not (here / "runs").exists()


def test_invalid_file_or_dry_run_writes_nothing(here: Path) -> None:
    for text in ("seed = -1\n", FILES["trainer"] + "wrong = 1\n"):
        with pytest.raises(ConfigError):
            prepare_role("trainer", text)
    with pytest.raises(SystemExit):
        prepare_role("trainer", FILES["trainer"], "--dry-run")
    assert not (here / "runs").exists()


def test_torchrun_ranks_read_file_identically(here: Path) -> None:
    file = here / "trainer.toml"
    file.write_text(FILES["trainer"])
    ranks = [
        claim_identity(load_file(TrainerConfig, file, section="trainer", complete=complete_role_file)) for _ in range(2)
    ]
    assert ranks[0] == ranks[1] == prepare_role("trainer", FILES["trainer"])


def test_damaged_identity_file_is_refused_by_name(here: Path) -> None:
    paths = RunPaths(here / "runs" / "rl")
    paths.root.mkdir(parents=True)
    paths.identity.write_text("{")
    with pytest.raises(RoleError, match=r"identity\.json is damaged; remove it"):
        prepare_role("trainer", FILES["trainer"])


def test_complete_file_is_used_without_identity_file(here: Path) -> None:
    whole = {"name": "r", "uid": "u", "output_dir": str(here / "out")}
    config = prepare_role("inference", FILES["inference"], *(f"--{k.replace('_', '-')}={v}" for k, v in whole.items()))
    assert (config.name, config.uid, config.output_dir) == ("r", "u", str(here / "out"))
    assert not (here / "out" / "identity.json").exists()


@pytest.mark.parametrize(
    "example",
    sorted((ROOT / "examples").glob("*.yaml")) + sorted((ROOT / "examples" / "models").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_launcher_files_are_used_unchanged(example: Path, here: Path) -> None:
    """A changed file would have another fingerprint than its run."""
    run, _ = parse_manifest(example.read_text(), str(example))
    config = resolve_spec(run.spec, name=run.metadata.name, uid="uid", output_dir=str(here / "run"))
    file = here / "run.json"
    file.write_text(config.model_dump_json())
    for role, model in MODELS.items():
        if (rendered := getattr(config, role)) is not None:
            assert load_file(model, file, section=role, complete=complete_role_file) == rendered


@pytest.mark.parametrize("role", MODELS)
def test_help_page_marks_required_fields_of_handwritten_file(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_role(role, MODELS[role], ["--help"], {})
    page = capsys.readouterr().out
    options = dict(re.findall(r"^  --([a-z-]+) VALUE\n((?:      .*\n)+)", page, re.MULTILINE))
    assert {"name", "uid", "max-steps"} <= options.keys()
    assert [name for name, text in options.items() if "required" in text] == []
    assert "--model (required)" in page
    for line in ("default: the name in output_dir, or rl", "default: runs/<name>", "default: 2048", "default: 100"):
        assert line in page


def test_misspelled_trainer_option_gets_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"--replya: unknown option \(did you mean --replay\?\)"):
        load_role("trainer", TrainerConfig, ["--replya", "x"], {})
