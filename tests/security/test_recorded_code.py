"""Code named by a foreign run folder: it runs only with a flag of the caller."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.cli import export
from rlrun.cli.evaluation import eval_parser, synthesize_parser
from rlrun.cli.main import main
from rlrun.cli.replay_runs import fork_parser, replay_parser
from rlrun.config.loading.loader import load_file
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, LossConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.config.named_code import NamedCode
from rlrun.evaluate import evaluation_job
from rlrun.hub.repository import VARIABLE, Repository, as_recorded, kept_commit
from rlrun.local import local_command as launcher
from rlrun.local.judge import Judged
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.protocol.files.checkpoint_manifest import Manifest, describe_part, write_manifest
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import FLAG, check_recorded_code, note_started_run
from rlrun.runtime import exit_codes
from rlrun.ui.run_registry import run_id
from tests.support.made_runs import client, made, page_files
from tests.support.python_path import before
from tests.unit.replay.test_find import config
from tests.unit.replay.test_find import sample as batch_sample

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that planted code writes. The working directory contains the planted modules, as a downloaded folder can."""
    found = tmp_path / "mark"
    place = tmp_path / "downloaded"
    place.mkdir()
    (place / "planted_code.py").write_text(f"open({str(found)!r}, 'w').close()\ndef make(*_, **__): ...\n")
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return found


@pytest.fixture
def planted_model(tmp_path: Path, mark: Path) -> Path:
    """Model folder whose configuration is code."""
    folder = tmp_path / "downloaded" / "planted"
    folder.mkdir()
    auto_map = {"AutoConfig": "configuration_planted.Planted"}
    (folder / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": auto_map}))
    code = "from transformers import PretrainedConfig\nclass Planted(PretrainedConfig):\n    model_type = 'planted'\n"
    (folder / "configuration_planted.py").write_text(f"open({str(mark)!r}, 'w').close()\n{code}")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def foreign_run(folder: Path, **changes: Any) -> RunPaths:
    """Write a run of one step with a complete checkpoint, a batch and a manifest."""
    paths = RunPaths(folder)
    paths.attempts.mkdir(parents=True)
    paths.run_json.write_text(json.dumps({"trainer": config(folder, **changes).model_dump(mode="json")}))
    write_attempt(paths, first_attempt(world_size=1, config_hash=""))
    write_batch(paths.batch(1, 1), Batch(1, 1, (batch_sample("t", 0),)))
    checkpoint = paths.checkpoint(1, 1)
    for part in ("trainer", "orchestrator"):
        (checkpoint / part).mkdir(parents=True)
        (checkpoint / part / "file").write_text("x")
    entries = [entry for part in ("trainer", "orchestrator") for entry in describe_part(checkpoint, checkpoint / part)]
    write_manifest(checkpoint, Manifest(1, 1, 1, "h", tuple(entries), 0.0))
    return paths


def kept_manifest(paths: RunPaths, **changes: Any) -> None:
    """Write a manifest into the folder of a run."""
    document = yaml.safe_load(QUICKSTART.read_text())
    document["spec"] |= changes
    paths.manifest.write_text(yaml.safe_dump(document))


def own_loss() -> AlgorithmConfig:
    return AlgorithmConfig(loss=LossConfig(name="planted_code:make"))


def export_words(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    paths = foreign_run(tmp_path / "run", model=ModelConfig(path=str(model), trust_remote_code=True))
    return ["export", str(paths.root), "--output", str(tmp_path / "out")], f"model.trustRemoteCode: true, of {model}"


def replay_words(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    paths = foreign_run(tmp_path / "run", algorithm=own_loss())
    return ["replay", str(paths.root), "--step", "1", "--ranks", "1"], "algorithm.loss.name: planted_code:make"


def fork_words(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, environments=[{"id": "planted_code:make"}])
    return ["fork", str(paths.root)], "environments[0].id: planted_code:make"


def fork_of_interpreter(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    python = tmp_path / "downloaded" / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path / 'mark'}\n")
    python.chmod(0o755)
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, environments=[{"id": "reverse-text", "python": str(python)}])
    return ["fork", str(paths.root)], f"environments[0].python: {python}"


def fork_of_reward(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n' * 8)
    args = {"path": str(data), "reward": "planted_code:make"}
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, environments=[{"id": "dataset", "args": args}])
    return ["fork", str(paths.root)], "environments[0].args.reward: planted_code:make"


def fork_of_model(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, model={"path": str(model), "trustRemoteCode": True})
    return ["fork", str(paths.root)], f"model.trustRemoteCode: true, of {model}"


def fork_of_own_class(tmp_path: Path, model: Path) -> tuple[list[str], str]:
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, model={"path": str(model), "class": "planted_code:make"})
    return ["fork", str(paths.root)], "model.class: planted_code:make"


ATTEMPTS = [
    export_words,
    replay_words,
    fork_words,
    fork_of_interpreter,
    fork_of_reward,
    fork_of_model,
    fork_of_own_class,
]


Words = Callable[[Path, Path], tuple[list[str], str]]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_code_of_folder_does_not_run_without_flag(
    attempt: Words,
    tmp_path: Path,
    mark: Path,
    planted_model: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, named = attempt(tmp_path, planted_model)
    code = main(words)
    said = capfd.readouterr().err
    assert not mark.exists(), f"code of the folder ran: {said}"
    assert code == exit_codes.USAGE, said
    assert f"{tmp_path / 'run'} names code that this command would run as you: {named}" in said
    assert FLAG in said


LOADS_TORCH = (export_words, replay_words, fork_of_model, fork_of_own_class)
"""With the flag, these import torch and transformers for 5 s of CPU time before they load the code."""


@pytest.mark.parametrize(
    "attempt",
    [pytest.param(attempt, marks=[pytest.mark.full] if attempt in LOADS_TORCH else []) for attempt in ATTEMPTS],
)
def test_code_of_folder_runs_with_flag(
    attempt: Words, tmp_path: Path, mark: Path, planted_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, _ = attempt(tmp_path, planted_model)
    main([*words, FLAG])
    assert mark.exists(), capfd.readouterr().err
    assert "planted_code" not in sys.modules


@pytest.mark.parametrize("attempt", LOADS_TORCH)
def test_command_with_flag_starts_to_load_code(
    attempt: Words,
    tmp_path: Path,
    mark: Path,
    planted_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The flag reaches the check of each command. The packages that would load the code are absent, unless another test has loaded them:
    the command then passes the check and ends at the folder's damaged files.
    """
    started = tmp_path / "started"
    (tmp_path / "absent").mkdir()
    for package in ("torch", "transformers"):
        file = tmp_path / "absent" / f"{package}.py"
        file.write_text(f"open({str(started)!r}, 'w').close()\nraise ImportError('absent')\n")
    monkeypatch.setenv("PYTHONPATH", before(tmp_path / "absent"))
    monkeypatch.syspath_prepend(str(tmp_path / "absent"))
    words, _ = attempt(tmp_path, planted_model)
    loaded = "torch" in sys.modules
    with suppress(ImportError):
        main([*words, FLAG])
    said = capfd.readouterr().err
    assert started.exists() or mark.exists() or (loaded and said and FLAG not in said), said


SHOWING = [
    ["get", "RUN"],
    ["status", "RUN"],
    ["why", "RUN"],
    ["logs", "RUN", "--role", "trainer"],
    ["rollouts", "RUN", "--worst", "1"],
    ["debug", "RUN", "--file", "OUT"],
    ["compare", "RUN", "COPY"],
    ["cost", "RUN"],
    ["plot", "RUN"],
    ["replay", "RUN", "--step", "1", "--sample", "0", "--no-compute"],
    ["track", "RUN"],
    ["mirror", "RUN"],
]


def hostile_run(folder: Path, model: Path) -> RunPaths:
    """Write a run whose complete configuration and manifest name code in each possible field."""
    python = folder.parent / "interpreter"
    python.write_text(f"#!/bin/sh\ntouch {folder.parent / 'mark'}\n")
    python.chmod(0o755)
    paths = foreign_run(folder)
    own = {"loss": {"name": "planted_code:make"}, "advantage": {"name": "planted_code:make"}}
    environment = {"id": "planted_code:make", "python": str(python), "args": {"reward": "planted_code:make"}}
    kept_manifest(
        paths,
        model={"path": str(model), "trustRemoteCode": True},
        environments=[environment | {"algorithm": own}],
        algorithm=own,
    )
    spec = parse_manifest(paths.manifest.read_text(), "manifest")[0].spec
    document = resolve_spec(spec, name="run", uid="uid", output_dir=str(folder)).model_dump_json(by_alias=False)
    made(folder)
    paths.run_json.write_text(document)
    paths.attempt_config(1).write_text(document)
    paths.attempt_file(1).unlink()
    write_attempt(paths, first_attempt(world_size=1, config_hash=""))
    logs = paths.logs(1, "trainer")
    logs.mkdir(parents=True)
    (logs / "rank_0.log").write_text("line\n")
    trace = paths.root / "traces" / "step_00000003.jsonl"
    trace.with_name("step_00000001.jsonl").write_text(trace.read_text().replace('"step": 3', '"step": 1'))
    return paths


def test_read_only_commands_run_no_code_of_run(
    tmp_path: Path, mark: Path, planted_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, copy = (hostile_run(tmp_path / name, planted_model).root for name in ("run", "copy"))
    places = {"RUN": str(run), "COPY": str(copy), "OUT": str(tmp_path / "debug.tar.gz")}
    codes = {}
    for words in SHOWING:
        codes[words[0]] = main([places.get(word, word) for word in words])
        assert not mark.exists(), words
    expected = dict.fromkeys(codes, exit_codes.OK) | dict.fromkeys(("track", "mirror"), exit_codes.USAGE)
    assert codes == expected, capfd.readouterr().err[-3000:]  # The run names no tracker and no storage.
    assert "planted_code" not in sys.modules


PAGES = [
    "/api/runs",
    "/api/runs/ID",
    "/api/runs/ID/manifest",
    "/api/runs/ID/history",
    "/api/runs/ID/lineage",
    "/api/runs/ID/curves?metric=reward/mean",
    "/api/runs/ID/sparkline",
    "/api/runs/ID/timeline",
    "/api/runs/ID/staleness?step=1",
    "/api/runs/ID/traces",
    "/api/runs/ID/rollouts?step=1",
    "/api/runs/ID/rollouts/0?step=1",
    "/api/runs/ID/rollouts/0/tokens?step=1",
    "/api/runs/ID/rollouts/0/reasons?step=1",
]


def test_web_page_runs_no_code_of_run(tmp_path: Path, mark: Path, planted_model: Path) -> None:
    run = hostile_run(tmp_path / "run", planted_model).root
    with page_files(tmp_path / "page") as static:
        page, _ = client(run, static=static)
        for path in PAGES:
            address, _, query = path.replace("ID", run_id(run)).partition("?")
            reply = page.get(address, **dict(part.split("=") for part in query.split("&") if part))
            assert reply.status == 200, (path, reply.body)
    assert not mark.exists()
    assert "planted_code" not in sys.modules


def test_run_started_by_same_user_needs_no_flag(tmp_path: Path, mark: Path, planted_model: Path) -> None:
    root = hostile_run(tmp_path / "run", planted_model).root
    code = [NamedCode("algorithm.loss.name", "planted_code:make")]
    with pytest.raises(RoleError, match=FLAG):
        check_recorded_code(root, code, trusted=False)
    note_started_run(root, load_file(RunConfig, root / "run.json"))
    check_recorded_code(root, code, trusted=False)

    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    with pytest.raises(RoleError, match=f"{copy} names code"):
        check_recorded_code(copy, code, trusted=False)
    for field, changed in (("planted_code:make", "other_code:make"), ('"uid":"uid"', '"uid":"other"')):
        before = (root / "run.json").read_text()
        assert field in before
        (root / "run.json").write_text(before.replace(field, changed))
        with pytest.raises(RoleError, match=FLAG):
            check_recorded_code(root, code, trusted=False)
        (root / "run.json").write_text(before)
    check_recorded_code(root, code, trusted=False)


def test_manifest_of_caller_needs_no_flag(tmp_path: Path, mark: Path) -> None:
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, environments=[{"id": "planted_code:make"}])
    own = tmp_path / "own.yaml"
    paths.manifest.rename(own)
    main(["fork", str(paths.root), "--manifest", str(own)])
    assert mark.exists()


@pytest.mark.parametrize("revision", [None, "main"])
def test_recorded_commit_selects_no_code_of_trusted_repository(tmp_path: Path, revision: str | None) -> None:
    """The manifest of `rlrun eval` trusts the repository, but the folder names the commit: anyone can propose a commit on the hub."""
    model = ModelConfig(name="org/model", revision=revision, trust_remote_code=True)
    spec = parse_manifest(QUICKSTART.read_text(), "x")[0].spec.model_copy(update={"model": model})
    run, commit = RunPaths(tmp_path / "run"), "a" * 40
    run.revisions.mkdir(parents=True)
    (run.revisions / "models--org--model@main.json").write_text(json.dumps({"commit": commit}))
    choose = partial(evaluation_job._resolve_model, spec, "run", run, tmp_path / "work", Console())
    with pytest.raises(RoleError, match=f"revisions: commit {commit} of org/model.*{FLAG}"):
        choose(trusts_code=False)
    assert choose(trusts_code=True)[0].revision == commit
    spec.model.__dict__["trust_remote_code"] = False
    assert choose(trusts_code=False)[0].revision == commit


COMMIT = "a" * 40
TRUSTED: dict[str, Any] = {"name": "org/model", "trustRemoteCode": True}


class ReachedError(Exception):
    """The launcher is about to start the roles."""


@pytest.fixture
def resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Function that returns the exit code of `rlrun local [--resume]` with the caller's own manifest. It raises `ReachedError` before it
    starts a role."""

    def reach(*_: Any, **__: Any) -> None:
        raise ReachedError

    def run(folder: Path, model: dict[str, Any], *words: str) -> int:
        spec = RLRunSpec.model_validate({"model": model, "environments": [{"id": "reverse-text"}]})
        parser = launcher.Parser("rlrun local", "")
        launcher.add_options(parser)
        options = parser.parse_args(["--output-dir", str(folder), "--plain", *words])
        return launcher.run_spec(spec, name="demo", options=options, console=Console(), command="rlrun local run.yaml")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher, "plan_processes", reach)
    monkeypatch.setattr(launcher, "prepare_model", lambda *_: None)
    monkeypatch.setattr(launcher, "check_trackers", lambda *_: None)
    return run


def downloaded_run(folder: Path, model: dict[str, Any]) -> RunPaths:
    """Write a foreign folder for the manifest of `resume`: the run's configuration is the caller's own."""
    spec = RLRunSpec.model_validate({"model": model, "environments": [{"id": "reverse-text"}]})
    paths = RunPaths(folder)
    paths.revisions.mkdir(parents=True)
    paths.run_json.write_text(resolve_spec(spec, name="demo", uid="u", output_dir=str(folder)).model_dump_json())
    return paths


def record_commit(paths: RunPaths, revision: str = "main") -> None:
    (paths.revisions / f"models--org--model@{revision}.json").write_text(json.dumps({"commit": COMMIT}))


def test_resumed_folder_selects_no_commit_of_trusted_repository(
    tmp_path: Path, resume: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = downloaded_run(tmp_path / "run", TRUSTED)
    record_commit(paths)
    before = paths.run_json.read_text()
    assert resume(paths.root, TRUSTED, "--resume") == exit_codes.USAGE
    error = capsys.readouterr().err
    assert f"revisions: commit {COMMIT} of org/model, whose code model.trustRemoteCode runs" in error
    assert FLAG in error
    assert paths.run_json.read_text() == before
    assert not (tmp_path / "cache").exists(), "a refused folder is not a run of this user"
    with pytest.raises(ReachedError):
        resume(paths.root, TRUSTED, "--resume", FLAG)


def test_resumed_folder_provides_no_trusted_tiny_model_files(
    tmp_path: Path, resume: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"tiny": {}, "trustRemoteCode": True}
    paths = downloaded_run(tmp_path / "run", model)
    paths.model.mkdir()
    assert resume(paths.root, model, "--resume") == exit_codes.USAGE
    assert f"model: files of {paths.model}, whose code model.trustRemoteCode runs" in capsys.readouterr().err
    with pytest.raises(ReachedError):
        resume(paths.root, model, "--resume", FLAG)


def test_resumed_folder_without_trusted_code_needs_no_flag(tmp_path: Path, resume: Callable[..., int]) -> None:
    model = {"name": "org/model"}
    paths = downloaded_run(tmp_path / "run", model)
    record_commit(paths)
    with pytest.raises(ReachedError):
        resume(paths.root, model, "--resume")


def test_locally_started_run_resumes_without_flag(
    tmp_path: Path, resume: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails without the call of `note_started_run` in the launcher."""
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(ReachedError):
        resume(paths.root, TRUSTED)
    paths.revisions.mkdir()
    record_commit(paths)
    with pytest.raises(ReachedError):
        resume(paths.root, TRUSTED, "--resume")

    copy = RunPaths(tmp_path / "copy")
    shutil.copytree(paths.root, copy.root)
    assert resume(copy.root, TRUSTED, "--resume") == exit_codes.USAGE
    assert f"{copy.root} names code" in capsys.readouterr().err


def test_manifest_in_run_folder_is_not_trusted(tmp_path: Path, mark: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`rlrun why` and `rlrun fork` recommend the manifest of the folder."""
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, environments=[{"id": "planted_code:make"}])
    words = ["local", str(paths.manifest), "--output-dir", str(paths.root), "--resume"]
    assert main(words) == exit_codes.USAGE
    assert not mark.exists()
    error = capfd.readouterr().err
    assert f"{paths.root} names code that this command would run as you: environments[0].id: planted_code:make" in error
    kept_manifest(paths, environments=[{"id": "planted_code:make"}], maxSteps="many")
    assert main(words) == exit_codes.CONFIGURATION
    assert not mark.exists(), "a manifest with problems is not loaded further"


def test_fork_starts_with_recommended_command(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = foreign_run(tmp_path / "run")
    kept_manifest(paths, environments=[{"id": "planted_code:make"}])
    monkeypatch.setattr("rlrun.replay.fork_run.judge_manifest", lambda text, *_, **__: accept_manifest(text))
    code = main(["fork", str(paths.root), "--folder", str(tmp_path / "a fork"), FLAG])
    out, err = capfd.readouterr()
    assert code == exit_codes.OK, err
    recommended = re.search(r"start it with `rlrun (local .*)`", out)
    assert recommended is not None
    reached = []
    monkeypatch.setattr(launcher, "judge_manifest", lambda *_, **__: reached.append(True) or Judged(None, (), (), 78))
    assert main(shlex.split(recommended[1])) == exit_codes.CONFIGURATION
    assert reached, capfd.readouterr().err


def accept_manifest(text: str) -> Judged[RLRun]:
    """Return the judgment of a manifest without loading its code."""
    return Judged(parse_manifest(text, "manifest")[0], (), (), exit_codes.OK)


def test_record_does_not_replace_full_commit_of_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = "b" * 40
    model = {"name": "org/model", "revision": pinned}
    repository = Repository("model", "org/model", pinned, "model.name", "model.revision")
    paths = downloaded_run(tmp_path / "run", model)
    record_commit(paths, pinned)
    monkeypatch.setenv(VARIABLE, str(paths.revisions))
    named = f"models--org--model@{pinned}.json contains commit {COMMIT}, but model.revision is commit {pinned}; delete the file"
    for read in (
        lambda: kept_commit(repository, lambda: pinned),
        lambda: as_recorded(ModelConfig(name="org/model", revision=pinned), paths),
    ):
        with pytest.raises(RoleError, match=named) as refused:
            read()
        assert refused.value.code == exit_codes.DATA
    (paths.revisions / f"models--org--model@{pinned}.json").unlink()
    assert kept_commit(repository, lambda: COMMIT) == pinned
    assert kept_commit(repository, lambda: COMMIT) == pinned, "its own record agrees"


def test_each_command_that_can_run_recorded_code_has_flag() -> None:
    parsers = (
        launcher.local_parser(),
        export.export_parser(),
        replay_parser(),
        fork_parser(),
        eval_parser(),
        synthesize_parser(),
    )
    assert [parser.prog for parser in parsers if FLAG not in parser.format_help()] == []
