"""Single damage in each file of a run's folder: each reader returns, or fails with an error that names the file; no traceback."""

from __future__ import annotations

import fnmatch
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from loguru import logger
from stub_run import stub_run

from rlrun.cli.main import main
from rlrun.config.models.checkpoint import ResumeConfig
from rlrun.hub.repository import Repository, recorded_commit
from rlrun.inspect.comparison import fields_of_folder
from rlrun.inspect.configurations import attempts_kept
from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.gpu_cost import of_folder
from rlrun.inspect.small_files import each_line, read_config, tail_lines
from rlrun.orchestrator.checkpoint import earlier_attempts, read_snapshot
from rlrun.orchestrator.journal.frames import DroppedEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import SegmentWriter
from rlrun.protocol.files.attempts import first_attempt, read_attempt
from rlrun.protocol.files.batch import BatchError, read_batch
from rlrun.protocol.files.checkpoint_manifest import (
    ManifestError,
    complete_checkpoints,
    newest_attempt,
    read_manifest,
    verify_files,
)
from rlrun.protocol.files.failures import RoleError, read_error, write_error
from rlrun.protocol.files.identity import read_identity
from rlrun.protocol.files.launcher_record import new_record, read_record, write_record
from rlrun.protocol.files.metrics_line import Lines, read_metrics
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom, fork_document, read_fork, recorded_run
from rlrun.protocol.files.shared_trainer_files import (
    SlotAnswer,
    SlotRequest,
    last_state,
    read_requests,
    write_answer,
    write_request,
)
from rlrun.replay.step_files import read_run
from rlrun.runtime import exit_codes
from rlrun.tracking.worker import read_sent
from rlrun.trainer.checkpoints.resume import choose_base
from rlrun.ui.traces import TraceIndex

SMALL = 400
"""Size up to which the full set damages each byte and cuts at each length; larger files get random places with a fixed seed."""
GATE, FULL = 3, 60
"""Numbers of random places."""
NOW = 2e9
MODEL = Repository("model", "org/model", "main", "model.name", "model.revision")
Read = Callable[[RunPaths, Path], object]


@dataclass(frozen=True)
class Row:
    """One kind of file."""

    pattern: str
    """Path below the run's folder."""
    readers: tuple[Read, ...] = ()
    exact: bool = False
    """True if a checksum protects the file: a reader returns the undamaged content or fails."""
    reason: str = ""
    """Reason why this kind has no readers here."""


def _read_newest_attempt(paths: RunPaths, file: Path) -> object:
    found = newest_attempt(paths, lambda message: None)
    return None if found is None else (found.lineage, found.origin)


def _choose_base(paths: RunPaths, file: Path) -> object:
    base = choose_base(paths, ResumeConfig(), with_orchestrator=True, log=lambda message: None)
    assert base is not None, "the run starts from the model although it has complete checkpoints"
    assert base.checkpoint.step in (4, 5)
    verify_files(base.checkpoint.path, read_manifest(base.checkpoint.path))
    return None


def _verify_checkpoint(paths: RunPaths, file: Path) -> object:
    folder = next(one.path for one in complete_checkpoints(paths) if one.path in file.parents)
    return verify_files(folder, read_manifest(folder))


def _read_kept_attempts(paths: RunPaths, file: Path) -> object:
    return attempts_kept(paths, lambda path: path.open("rb"), None, lambda config: config)


def _read_trace(paths: RunPaths, file: Path) -> object:
    with file.open("rb") as content:
        index = TraceIndex(content)
        return [
            index.lag_counts(4),
            *(index.select_rows(_match_all(), order) for order in ("worst", "longest", "trace")),
        ]


def _match_all() -> object:
    from rlrun.ui.traces import Filter

    return Filter()


CHECKPOINT = (_verify_checkpoint, _choose_base)
ROWS = (
    Row("run.json", (lambda p, f: recorded_run(p), lambda p, f: read_config(p, [1]), lambda p, f: read_folder(p.root, NOW),
                     lambda p, f: len(read_run(p.root).batches))),
    Row("identity.json", (lambda p, f: read_identity(RunPaths(_copy_alone(f))),)),
    Row("manifest.yaml", (lambda p, f: fields_of_folder(p, {}),)),
    Row("launcher.json", (lambda p, f: read_record(f), lambda p, f: read_folder(p.root, NOW), lambda p, f: of_folder(p.root, NOW))),
    Row("fork.json", (lambda p, f: read_fork(f), lambda p, f: of_folder(p.root, NOW))),
    Row("metrics.jsonl", (lambda p, f: read_metrics(f), lambda p, f: list(each_line(f)), lambda p, f: Lines(f).new(),
                          lambda p, f: tail_lines(f), lambda p, f: of_folder(p.root, NOW))),
    Row("attempts/*.config.json", (_read_kept_attempts,)),
    Row("attempts/[0-9][0-9][0-9][0-9].json", (lambda p, f: read_attempt(f), _read_newest_attempt), exact=True),
    Row("attempts/0001.json", (_read_kept_attempts, lambda p, f: of_folder(p.root, NOW), lambda p, f: read_folder(p.root, NOW),
                               lambda p, f: earlier_attempts(p, first_attempt(world_size=1, config_hash="h", attempt=9),
                                                             log=logger.warning))),
    Row("checkpoints/*/manifest.json", (lambda p, f: read_manifest(f.parent),), exact=True),
    Row("checkpoints/*/manifest.json", (_choose_base,)),
    Row("checkpoints/*/trainer/*", CHECKPOINT, exact=True),
    Row("checkpoints/*/orchestrator/state.json", CHECKPOINT, exact=True),
    Row("checkpoints/*/orchestrator/state.json", (lambda p, f: read_snapshot(f.parents[1]),)),
    Row("rollouts/*/*", (lambda p, f: read_batch(f.parent),), exact=True),
    Row("journal/segment_*", (lambda p, f: read_segment(f),)),
    Row("traces/*.jsonl", (_read_trace, lambda p, f: list(each_line(f)))),
    Row("tracking/sent.*", (lambda p, f: read_sent(f),)),
    Row("revisions/*.json", (lambda p, f: recorded_commit(p, MODEL),)),
    Row("shared/*/join.json", (lambda p, f: read_requests(p),)),
    Row("shared/*/state.json", (lambda p, f: last_state(p, "guest"),)),
    Row("logs/*/error.json", (lambda p, f: read_error(f.parent),)),
    Row("logs/*/config.json", (_read_kept_attempts, lambda p, f: read_config(p, [1]))),
    Row("logs/*", reason="text for people: each byte is shown, escaped"),
    Row("weights/*", reason="engines and the trainer read them: tests/unit/inference, tests/tensors/trainer"),
    Row("exports/*", reason="as weights"),
    Row("model/*", reason="transformers reads it"),
    Row("stub.json", reason="of the stubs"),
)  # fmt: skip


def _copy_alone(file: Path) -> Path:
    """Return a folder with only this file, because no reader uses it next to `run.json`."""
    folder = file.parent.with_name("alone")
    folder.mkdir(exist_ok=True)
    shutil.copy(file, folder)
    return folder


def rows_of(name: str) -> list[Row]:
    """Return the rows of a file by its path in the run's folder; a folder name matches all paths below."""
    return [row for row in ROWS if fnmatch.fnmatch(name, row.pattern)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a stub run of two attempts, with the additional files of launchers, forks, guests and trackers."""
    root = tmp_path_factory.mktemp("damaged")
    settings = {"checkpoint": {"interval": 2, "keep_last": 3}}
    with stub_run(root, max_steps=5, trainer=settings, orchestrator=settings | {"record_rollouts": True}) as run:
        run.is_forked = True
        run.script(trainer={"stepSeconds": 0.0}, policy={})
        run.wait(run.start("model"))
        run.start("inference")
        trainer, orchestrator = run.start("trainer"), run.start("orchestrator")
        assert run.wait(orchestrator) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        paths = run.paths
    _add_files(paths)
    return paths.root


def _add_files(paths: RunPaths) -> None:
    """Write the files that a stub run lacks, each with its own writer."""
    paths.identity.write_text(json.dumps({"name": "stub", "uid": "u"}))
    manifest = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "stub"}}
    spec = {"model": {"tiny": {}}, "environments": [{"id": "reverse-text", "groupSize": 8}], "maxSteps": 5}
    paths.manifest.write_text(json.dumps(manifest | {"spec": spec}, indent=1))
    assert write_record(paths.launcher, new_record("stub", 1, "rlrun local run.yaml --resume", {"trainer": 1}))
    paths.fork.write_text(fork_document(ForkedFrom("other", "u", 3, 0, "/runs/other", ("maxSteps",))))
    paths.attempt_config(1).write_bytes(paths.run_json.read_bytes())
    write_request(paths, SlotRequest(run="guest", attempt=1, folder="/runs/guest", key_digest="0" * 64))
    write_answer(paths, SlotAnswer(run="guest", attempt=1, state="Joined", slot=1))
    write_error(paths.logs(1, "trainer"), "trainer", RoleError("out of memory"))
    paths.logs(1, "orchestrator").mkdir(parents=True, exist_ok=True)
    (paths.logs(1, "orchestrator") / "config.json").write_text(json.dumps({"orchestrator": {"name": "stub"}}))
    (paths.root / "tracking").mkdir(exist_ok=True)
    (paths.root / "tracking" / "sent.test").write_text("1 1\n2 1\n= 2\n3 1\n")
    writer = SegmentWriter(paths, attempt=1, fingerprint="f")
    writer.write([DroppedEntry(group, "filtered", 0.5, group + 1, 0) for group in range(3)])
    writer.close()
    paths.revisions.mkdir()
    (paths.revisions / "models--org--model@main.json").write_text(json.dumps({"commit": "a" * 40}))
    assert recorded_commit(paths, MODEL) == "a" * 40


def files_of(root: Path) -> list[str]:
    """Return the files below a folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def damages_of(name: str, content: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield one changed byte, cuts and blocks of zeros, at each place of a small file, or at random places seeded with the file's name."""
    places = range(len(content))
    drawn = random.Random(name).sample(places, min(most, len(content)))
    for at in places if most == FULL and len(content) <= SMALL else sorted(drawn):
        for byte in (content[at] ^ 1, 0xFF):
            yield f"byte {at} is {byte:#04x}", content[:at] + bytes([byte]) + content[at + 1 :]
        yield f"cut at {at}", content[:at]
        yield f"zeros from {at}", content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]


def call_reader(row: Row, reader: Read, paths: RunPaths, file: Path) -> str | Exception:
    """Return the result of a reader, or its expected error."""
    try:
        return repr(reader(paths, file))
    except (RoleError, BatchError, ManifestError) as error:
        return error


def check_file(root: Path, name: str, most: int) -> int:
    """Damage a file in each way, and let each reader read it; return the number of refusals."""
    paths, file, refused = RunPaths(root), root / name, 0
    content = file.read_bytes()
    pairs = [(row, reader) for row in rows_of(name) for reader in row.readers]
    before = [call_reader(row, reader, paths, file) for row, reader in pairs]
    assert not [found for found in before if isinstance(found, Exception)], name
    for what, damaged in damages_of(name, content, most):
        file.write_bytes(damaged)
        for (row, reader), undamaged in zip(pairs, before, strict=True):
            found = call_reader(row, reader, paths, file)
            if isinstance(found, Exception):
                refused += 1
                assert any(part in str(found) for part in (file.name, file.parent.name)), (name, what, str(found))
            elif row.exact and damaged != content:
                assert found == undamaged, (name, what)
    file.write_bytes(content)
    return refused


def copy_folder(whole: Path, tmp_path: Path) -> Path:
    """Copy the folder under the same name."""
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def test_each_file_of_a_run_has_a_row(whole: Path) -> None:
    assert [name for name in files_of(whole) if not rows_of(name)] == []
    unused = [row.pattern for row in ROWS if row.readers and not fnmatch.filter(files_of(whole), row.pattern)]
    assert unused == []


@pytest.mark.parametrize("most", [GATE, pytest.param(FULL, marks=pytest.mark.full)])
def test_damaged_file_is_read_or_refused_by_name(whole: Path, tmp_path: Path, most: int) -> None:
    root = copy_folder(whole, tmp_path)
    refused = {name: check_file(root, name, most) for name in files_of(root)}
    exact = [name for name in refused if any(row.exact for row in rows_of(name)) and not name.startswith("attempts")]
    assert [name for name in exact if not refused[name]] == [], "damage of these is not found"


COMMANDS = ("status", "why", "cost", "logs", "rollouts", "get", "plot")
SLOW = ("compare", "fork")
SLOW_FILES = ("run.json", "manifest.yaml", "attempts/0001.json")
"""Files that only these commands read, or read in another way."""
ALL_CODES = (exit_codes.OK, exit_codes.USAGE, exit_codes.DATA, exit_codes.FAILURE, exit_codes.CONFIGURATION)


def call_command(command: str, root: Path) -> int:
    """Return the exit code of a command that reads the folder."""
    if command == "compare":
        return main([command, str(root), str(root)])
    if command == "fork":
        forked = root.with_name("forked")
        shutil.rmtree(forked, ignore_errors=True)
        return main([command, str(root), "--folder", str(forked), "--trust-recorded-code"])
    return main([command, str(root)])


@pytest.mark.parametrize("most", [1, pytest.param(6, marks=pytest.mark.full)])
def test_commands_end_with_a_message(
    whole: Path, tmp_path: Path, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_folder(whole, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in files_of(root):
        if not any(row.readers for row in rows_of(name)) or (most == 1 and "/step_00000004" in name):
            continue
        content = (root / name).read_bytes()
        for what, damaged in damages_of(name, content, most):
            (root / name).write_bytes(damaged)
            slow = SLOW if name in SLOW_FILES else ()
            for command in (*COMMANDS, *slow) if most > 1 else COMMANDS[:2]:
                code = call_command(command, root)
                told = capsys.readouterr().err
                assert "Traceback" not in told, (name, what, command, told)
                assert code in ALL_CODES, (name, what, command, code)
                assert code == exit_codes.OK or told, (name, what, command)
        (root / name).write_bytes(content)
