"""Fork of a run: a new run with its own folder, manifest and lineage, started from a copy of another run's checkpoint."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import Variation, manifest_text, parse_manifest
from rlrun.config.loading.files import read_text
from rlrun.config.loading.schema import snake_name
from rlrun.config.models.run_config import RunConfig
from rlrun.local.judge import judge_manifest, report_and_stop
from rlrun.local.user_code import code_of_folder, code_of_spec
from rlrun.protocol.files.attempts import Attempt, next_attempt, read_attempt
from rlrun.protocol.files.checkpoint_manifest import ORCHESTRATOR_PART, ManifestError, read_manifest, verify_files
from rlrun.protocol.files.durable import new_folder
from rlrun.protocol.files.metrics_line import metrics_lines
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code, is_own_run, note_started_run
from rlrun.protocol.files.run_folder import ForkedFrom, fork_document
from rlrun.replay.step_files import Recorded, ReplayError, read_run
from rlrun.runtime import exit_codes

FIXED: Mapping[str, str] = {
    "task": "the checkpoint belongs to this task",
    "model": "the checkpoint contains this model's weights",
    "trainer.lora": "the checkpoint contains these adapters",
    "trainer.sharedWith": "the checkpoint belongs to the run's own trainer",
    "trainer.optimizer.name": "the checkpoint contains the state of this optimizer",
    "trainer.optimizer.moments": "the checkpoint contains the moments in this format",
}
"""Fields that a fork cannot change, with the reason."""
_RESUME = "checkpoint.resume"
"""Field of the start checkpoint, which a fork ignores because it starts from its own."""


@dataclass(frozen=True)
class Forked:
    """A forked run, ready to start."""

    name: str
    folder: Path
    origin: ForkedFrom


def fork_run(
    root: Path,
    *,
    step: int | None,
    changes: Sequence[str] = (),
    name: str | None = None,
    folder: Path | None = None,
    manifest: Path | None = None,
    trusts_code: bool = False,
) -> Forked:
    """Create the folder of a new run from a checkpoint of another run, which is only read.

    Args:
        root: folder of the other run.
        step: step of the checkpoint. None: the newest complete one.
        changes: `a.b=c`, fields of `spec`.
        name: name of the new run. Default: `<run>-<step>`.
        folder: folder of the new run. Default: `runs/<name>`.
        manifest: manifest of the other run, if its folder has none.
        trusts_code: whether the caller trusts code that the manifest of the folder names.

    Raises:
        RoleError: the folder's manifest names code that the caller does not trust.
        ReplayError: the checkpoint is missing or damaged, a change contradicts it, or the folder is in use.
        ConfigError: a change does not fit the manifest.
        OSError: the folder cannot be written.
    """
    run = read_run(root)
    checkpoint = _find_checkpoint(run, step)
    chosen = name or _default_name(run.trainer.name, checkpoint.step)
    target = (folder or Path("runs") / chosen).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ReplayError(f"{target} already exists; set another --folder or --name", exit_codes.USAGE)
    before, after = _read_specs(run.paths, chosen, changes, manifest, trusts_code=trusts_code)
    changed = _changed_fields(before, after)
    _refuse_fork(changed, after, checkpoint.step)
    words = tuple(f"{path} {_show_value(old)} -> {_show_value(new)}" for path, (old, new) in changed.items())
    origin = ForkedFrom(
        run.trainer.name, run.trainer.uid, checkpoint.step, checkpoint.attempt, str(run.paths.root.absolute()), words
    )
    config = _write_folder(run, checkpoint, target, chosen, after, origin)
    if trusts_code or manifest is not None or is_own_run(run.paths.root):
        note_started_run(target, config)  # so that the recommended `rlrun local --resume` needs no flag
    return Forked(chosen, target, origin)


def _default_name(name: str, step: int) -> str:
    suffix = f"-{step}"
    return name[: 40 - len(suffix)].rstrip("-") + suffix


def _find_checkpoint(run: Recorded, step: int | None) -> Artifact:
    """Return the verified, complete checkpoint of a step."""
    steps = [one.step for one in run.checkpoints]
    known = f"it has checkpoints of steps {', '.join(map(str, steps))}" if steps else "it has no complete checkpoint"
    found = next((one for one in run.checkpoints if one.step == (steps[-1] if step is None else step)), None)
    if found is None:
        nearest = max((one for one in steps if step is not None and one < step), default=None)
        offer = "" if nearest is None else f"; use the nearest earlier one with --step {nearest}"
        raise ReplayError(
            f"{run.trainer.name} has no complete checkpoint of step {step}: {known}{offer}; "
            "checkpoint.interval sets how often checkpoints are saved, keepLast and keepInterval how many are kept",
            exit_codes.USAGE,
        )
    try:
        manifest = read_manifest(found.path)
        verify_files(found.path, manifest)
    except (ManifestError, OSError) as error:
        raise ReplayError(f"the checkpoint of step {found.step} is unusable: {error}") from None
    if not any(entry.path.startswith(f"{ORCHESTRATOR_PART}/") for entry in manifest.files):
        raise ReplayError(f"{found.path.name} has no {ORCHESTRATOR_PART} part, so no orchestrator can resume from it")
    return found


def _read_specs(
    paths: RunPaths, name: str, changes: Sequence[str], manifest: Path | None, *, trusts_code: bool = False
) -> tuple[RLRunSpec, RLRunSpec]:
    """Return the specification of the run and that of its fork. Problems of the fork are printed."""
    file = manifest or paths.manifest
    if not file.is_file():
        raise ReplayError(
            f"{file} does not exist; runs of older releases have no manifest in their folder, so set it with --manifest FILE",
            exit_codes.USAGE,
        )
    text = read_text(file)
    before = parse_manifest(text, str(file))[0].spec
    named = code_of_spec(before)
    if manifest is None and named:  # a manifest passed by the caller is trusted, like the caller's changes
        after = code_of_spec(parse_manifest(text, str(file), Variation(_read_options(changes)))[0].spec)
        check_recorded_code(paths.root, [one for one in named if one in after], trusted=trusts_code)
    judged = judge_manifest(text, str(file), here=True, variation=Variation(_read_options(changes)))
    code = report_and_stop(judged)
    if code is not None or judged.run is None:
        raise ReplayError("no fork was created: correct the changes listed above", code or exit_codes.CONFIGURATION)
    spec = judged.run.spec
    check_recorded_code(paths.root, list(code_of_folder(spec.model, paths)), trusted=trusts_code)
    checkpoint = spec.checkpoint.model_dump(exclude_unset=True, exclude={"resume"})
    return before, spec.model_copy(update={"checkpoint": type(spec.checkpoint).model_validate(checkpoint)})


def _read_options(changes: Sequence[str]) -> list[str]:
    """Convert `a.b=c` to options of a command line."""
    found: list[str] = []
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals or not path:
            raise ReplayError(
                f"--set {change}: expected FIELD=VALUE, such as trainer.optimizer.lr=1e-5", exit_codes.USAGE
            )
        found += [
            f"--{'.'.join(snake_name(part).replace('_', '-') for part in path.removeprefix('spec.').split('.'))}",
            value,
        ]
    return found


Changes = dict[str, tuple[object, object]]


def _changed_fields(before: RLRunSpec, after: RLRunSpec) -> Changes:
    """Return the differing fields of the fork by their YAML path, with both values."""
    one, other = (spec.model_dump(mode="json", by_alias=True) for spec in (before, after))
    return {path: (old, new) for path, old, new in _differing_fields("", one, other) if not path.startswith(_RESUME)}


def _differing_fields(path: str, one: object, other: object) -> Iterator[tuple[str, object, object]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from _differing_fields(f"{path}.{key}" if path else str(key), one.get(key), other.get(key))
    elif one != other:
        yield path, one, other


def _refuse_fork(changed: Changes, after: RLRunSpec, step: int) -> None:
    for path in changed:
        fixed = next((field for field in FIXED if path == field or path.startswith(f"{field}.")), None)
        if fixed is not None:
            raise ReplayError(
                f"{path} cannot be changed: {FIXED[fixed]}; start a new run without a checkpoint instead",
                exit_codes.CONFIGURATION,
            )
    if after.max_steps <= step:
        raise ReplayError(
            f"maxSteps is {after.max_steps}, but the checkpoint is at step {step}; add for example --set maxSteps={step * 2}",
            exit_codes.CONFIGURATION,
        )


def _show_value(value: object) -> str:
    return json.dumps(value)[:80]


def _write_folder(
    run: Recorded, checkpoint: Artifact, target: Path, name: str, spec: RLRunSpec, origin: ForkedFrom
) -> RunConfig:
    """Write the folder, which appears only when it is complete, and return its configuration."""
    uid = str(uuid.uuid4())
    config = resolve_spec(spec, name=name, uid=uid, output_dir=str(target))
    with new_folder(target) as made:
        made.chmod(0o700)  # like the folders of `rlrun local`
        paths = RunPaths(made)
        paths.manifest.write_text(manifest_text(spec, name))
        paths.run_json.write_text(config.model_dump_json(indent=1, by_alias=False) + "\n")
        paths.fork.write_text(fork_document(origin))
        paths.attempts.mkdir()
        attempt = _fork_lineage(run, checkpoint, uid)
        paths.attempt_file(attempt.attempt).write_text(json.dumps(asdict(attempt)))
        copied = paths.checkpoint(checkpoint.step, checkpoint.attempt)
        # Copies instead of links: a damaged block of a shared file would damage both runs.
        shutil.copytree(checkpoint.path, copied)
        for source in (run.paths.model, run.paths.revisions):
            if source.is_dir():
                shutil.copytree(source, made / source.name)
        with paths.metrics.open("wb") as metrics:
            metrics.writelines(_lines_up_to(run.paths.metrics, checkpoint.step))
        try:
            verify_files(copied, read_manifest(copied))
        except ManifestError as error:
            raise ReplayError(f"{checkpoint.path} changed during the copy: {error}") from None
    return config


def _fork_lineage(run: Recorded, checkpoint: Artifact, uid: str) -> Attempt:
    """Return the attempt of the new folder that owns the checkpoint and no later step."""
    wrote = read_attempt(run.paths.attempt_file(checkpoint.attempt))
    cut = next_attempt(
        wrote,
        checkpoint.step,
        attempt=checkpoint.attempt + 1,
        world_size=wrote.world_size,
        config_hash=wrote.config_hash,
    )
    return replace(wrote, lineage=cut.lineage[:-1], uid=uid)


def _lines_up_to(path: Path, through: int) -> Iterator[bytes]:
    """Return the complete lines of `metrics.jsonl` up to a step."""
    return (line for line, found in metrics_lines(path) if found is not None and found["step"] <= through)
