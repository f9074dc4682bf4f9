"""Explanation of a rollout's advantage, versions and tokens from the batch of its step, and commands for further analysis."""

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
    """Explain a trained rollout, with one block of lines per sample, if the batch of its step is still on the volume.

    Args:
        run: run with the batch.
        fetch: command that copies the run's folder to this machine (empty if local), and the name of that folder.
        step: step of the batch.
        place: attempt, group and rollout.
        clean: function that removes secrets from a line.

    Raises:
        OutsideError: a file is a link to the outside.
    """
    attempt, group, rollout = place
    sample = f"{group}/{rollout}"
    refused, samples = readable_batch(run, step, attempt), list[tuple[int, list[str]]]()
    try:
        samples = [] if refused is not None else _explained_samples(run, step, attempt, group, rollout)
        refused = refused or (None if samples else "the batch does not contain this rollout")
    except ImportError as error:
        refused = explain_import(error) or str(error)
    except ValueError as error:
        refused = clean(str(error))
    if len(samples) > 1:  # GROUP/ROLLOUT is ambiguous for several samples; an index is not
        sample = str(samples[0][0])
    shown = [[clean(line) for line in lines] for _, lines in samples]
    commands = next_commands(run.paths, shlex.quote(fetch[1]), step, sample)
    return rollout_answers.Reasons(
        samples=shown, fetch=fetch[0] or None if commands else None, commands=commands, why=refused
    )


def next_commands(paths: RunPaths, folder: str, step: int, sample: str) -> list[rollout_answers.NextCommand]:
    """Return commands for a step that can succeed with the batches and checkpoints that still exist.

    Args:
        paths: paths of the run.
        folder: shell-quoted folder of the run.
        step: step of the rollout.
        sample: name of the sample on the command line.
    """
    batches = {batch.step for batch in paths.batches_on_disk()}
    saved = [checkpoint.step for checkpoint in complete_checkpoints(paths)]
    replay, found = f"rlrun replay {folder} --step {step}", list[tuple[str, str]]()
    start = max((one for one in (0, *saved) if one < step), default=None)
    if start is not None and batches.issuperset(range(start + 1, step + 1)):
        found.append(("Loss of each token", f"{replay} --sample {sample}"))
        found.append(("Repeat the whole step", replay))
    elif step in batches:
        found.append(("The same explanation in a terminal", f"{replay} --sample {sample} --no-compute"))
    if saved:
        manifest = "" if paths.manifest.is_file() else " --manifest run.yaml"
        found.append(("Start a new run from a checkpoint", f"rlrun fork {folder}{manifest}"))
    return [rollout_answers.NextCommand(about=about, command=command) for about, command in found]


def _explained_samples(run: OpenRun, step: int, attempt: int, group: int, rollout: int) -> list[tuple[int, list[str]]]:
    """Return index and explanation lines of each sample of a rollout.

    Raises:
        ImportError: a package is missing.
        ValueError: the batch or the configuration cannot be read.
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
        note = f"run.json cannot be read, so the estimator is unknown: {str(error).splitlines()[0]}"
    own = {name: one.name for name, one in settings.items() if is_import_path(one.name)}
    settings = {
        name: one for name, one in settings.items() if name not in own
    }  # the page does not execute functions of users
    found = []
    for index, sample in enumerate(batch.samples):
        if (sample.group, sample.rollout) != (group, rollout):
            continue
        try:
            lines = report_text(report_sample(batch, index, settings), None).splitlines()
        except RoleError as error:
            raise ValueError(str(error)) from None
        if (function := own.get(sample.environment)) is not None:
            lines.append(f"  {function} is the run's own estimator: only rlrun replay calls it, not this page")
        found.append((index, [*lines, *([f"  {note}"] if note else [])]))
    return found
