"""Explanation of a rollout's advantage, versions and tokens from the batch of its step, and the commands that go further."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from rlrun.runtime.extras import explain
from rlrun.ui.models import rollout_answers
from rlrun.ui.registry import OpenRun
from rlrun.ui.tokens import readable_batch


def reasons(
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
    folder = shlex.quote(fetch[1])
    replayed = f"rlrun replay {folder} --step {step}"
    commands = [f"{replayed} --sample {group}/{rollout}", replayed, f"rlrun fork {folder}"]
    refused, samples = readable_batch(run, step, attempt), list[tuple[int, list[str]]]()
    try:
        samples = [] if refused is not None else _explained(run, step, attempt, group, rollout)
        refused = refused or (None if samples else "the batch does not hold this rollout")
    except ImportError as error:
        refused = explain(error) or str(error)
    except ValueError as error:
        refused = clean(str(error))
    if len(samples) > 1:  # GROUP/ROLLOUT names all of them
        commands[0] = f"{replayed} --sample {samples[0][0]}"
    shown = [[clean(line) for line in lines] for _, lines in samples]
    return rollout_answers.Reasons(samples=shown, fetch=fetch[0] or None, commands=commands, why=refused)


def _explained(run: OpenRun, step: int, attempt: int, group: int, rollout: int) -> list[tuple[int, list[str]]]:
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
    from rlrun.replay.sample import report, text

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
            lines = text(report(batch, index, settings), None).splitlines()
        except RoleError as error:
            raise ValueError(str(error)) from None
        if (function := own.get(sample.environment)) is not None:
            lines.append(f"  {function} is the run's own estimator: rlrun replay calls it, this page does not")
        found.append((index, [*lines, *([f"  {note}"] if note else [])]))
    return found
