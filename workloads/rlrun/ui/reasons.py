"""Explanation of a rollout's advantage, versions and tokens from the batch of its step, and the commands that go further."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.extras import explain_import
from rlrun.ui.models import rollout_answers
from rlrun.ui.registry import OpenRun
from rlrun.ui.tokens import readable_batch


def rollout_reasons(
    run: OpenRun, fetch: tuple[str, str], step: int, place: tuple[int, int, int], clean: Callable[[str], str]
) -> rollout_answers.Reasons:
    """Lines on a rollout that was trained, one block for each of its samples, as long as the batch of its step is on the volume.

    Args:
        run: has the batch.
        fetch: command that brings the run's folder to where commands read it, or empty, and that folder.
        step: whose batch it is.
        place: attempt, group and rollout.
        clean: takes secrets out of a line.

    Raises:
        OutsideError: a file is a link that leads out.
    """
    attempt, group, rollout = place
    sample = f"{group}/{rollout}"
    refused, samples = readable_batch(run, step, attempt), list[tuple[int, list[str]]]()
    try:
        samples = [] if refused is not None else _explained_samples(run, step, attempt, group, rollout)
        refused = refused or (None if samples else "the batch does not hold this rollout")
    except ImportError as error:
        refused = explain_import(error) or str(error)
    except ValueError as error:
        refused = clean(str(error))
    if len(samples) > 1:  # GROUP/ROLLOUT names all of them
        sample = str(samples[0][0])
    shown = [[clean(line) for line in lines] for _, lines in samples]
    commands = next_commands(run.paths, shlex.quote(fetch[1]), step, sample)
    return rollout_answers.Reasons(
        samples=shown, fetch=fetch[0] or None if commands else None, commands=commands, why=refused
    )


def next_commands(paths: RunPaths, folder: str, step: int, sample: str) -> list[rollout_answers.NextCommand]:
    """Commands on a step that can succeed with the batches and checkpoints of the run.

    Args:
        paths: of the run.
        folder: words that name the run's folder on a command line.
        step: the step.
        sample: words that name a rollout of it.
    """
    batches = {batch.step for batch in paths.batches_on_disk()}
    saved = [checkpoint.step for checkpoint in complete_checkpoints(paths)]
    replay, found = f"rlrun replay {folder} --step {step}", list[tuple[str, str]]()
    start = max((one for one in (0, *saved) if one < step), default=None)
    if start is not None and batches.issuperset(range(start + 1, step + 1)):
        found.append(("With its loss, token by token", f"{replay} --sample {sample}"))
        found.append(("The step again", replay))
    elif step in batches:
        found.append(("The same in a terminal", f"{replay} --sample {sample} --no-compute"))
    if saved:
        manifest = "" if paths.manifest.is_file() else " --manifest run.yaml"
        found.append(("A new run from a checkpoint", f"rlrun fork {folder}{manifest}"))
    return [rollout_answers.NextCommand(about=about, command=command) for about, command in found]


def _explained_samples(run: OpenRun, step: int, attempt: int, group: int, rollout: int) -> list[tuple[int, list[str]]]:
    """Index and lines of each sample of a rollout.

    Raises:
        ImportError: a package is missing.
        ValueError: batch or configuration cannot be read.
    """
    from rlrun.config.algorithm.names import is_import_path
    from rlrun.config.loading.loader import load_file
    from rlrun.config.loading.problems import ConfigError
    from rlrun.config.models.roles import OrchestratorConfig
    from rlrun.protocol.files.batch import read_batch
    from rlrun.protocol.files.failures import RoleError
    from rlrun.replay.advantage import advantage_settings
    from rlrun.replay.sample import report_sample, report_text

    batch = read_batch(run.paths.batch(step, attempt))
    settings, note = {}, None
    try:
        with run.fence.open(run.paths.run_json):
            config = load_file(OrchestratorConfig, run.paths.run_json, section="orchestrator")
        settings = advantage_settings(config) if config.task == "RL" else {}
    except (OSError, ConfigError) as error:
        note = f"run.json cannot be read, so that the estimator is not known: {str(error).splitlines()[0]}"
    own = {name: one.name for name, one in settings.items() if is_import_path(one.name)}
    settings = {name: one for name, one in settings.items() if name not in own}  # a page calls nobody's function
    found = []
    for index, sample in enumerate(batch.samples):
        if (sample.group, sample.rollout) != (group, rollout):
            continue
        try:
            lines = report_text(report_sample(batch, index, settings), None).splitlines()
        except RoleError as error:
            raise ValueError(str(error)) from None
        if (function := own.get(sample.environment)) is not None:
            lines.append(f"  {function} is the run's own estimator: rlrun replay calls it, this page does not")
        found.append((index, [*lines, *([f"  {note}"] if note else [])]))
    return found
