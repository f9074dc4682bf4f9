"""Checks of tasks and chat templates: unplayable tasks, prompts without space for a reply, unusable templates.

A row whose prompt is too long, is refused by the chat template or has no usable ground truth fails in the same way
each time. Its first rollout is conclusive and is not a sign of a faulty environment or engine, so the error budget
does not count it. The run stops if the share of unplayable tasks is too large. This part is pure.

`rlrun validate` counts unplayable prompts if model and data are on this machine, and checks the template if the model
is (`rlrun.local.read_inputs.template_checks`). Both need the tokenizer, which the command line does not import, so
they run in separate processes. The orchestrator checks the template at its start.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlrun.environments.episode import EpisodeError
from rlrun.environments.protocol import Task, TellsTurns
from rlrun.environments.registry import EnvironmentLoadError, load_environment
from rlrun.hub.repository import show_source
from rlrun.orchestrator.rollouts.chat_template import ChatTemplate, TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import UnplayablePromptError
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

WINDOW_GROUPS = 100
"""Number of latest groups of an environment whose share is limited; smaller for an environment with fewer training
tasks.
"""
MAX_RATIO = 0.5
"""Limit of the share of unplayable tasks in these groups; a higher share has another cause than single rows."""


def unplayable_reason(error: Exception) -> str | None:
    """Return the reason why each rollout of a task meets this error, such as `too_long`, or None if another try may
    succeed.
    """
    if isinstance(error, UnplayablePromptError):
        return error.reason
    return "row" if isinstance(error, EpisodeError) and error.kind == "task" else None


class UnplayableTasks:
    """Unplayable tasks of all environments found in this attempt.

    Args:
        sizes: number of training tasks by the environment's label.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self._found: dict[tuple[str, int], str] = {}
        self._windows = {label: deque[str | None](maxlen=min(WINDOW_GROUPS, size)) for label, size in sizes.items()}

    def reason(self, label: str, task: int) -> str | None:
        """Return the reason why a task is unplayable, such as `too_long`, or None if no rollout of it was refused."""
        return self._found.get((label, task))

    def add(self, label: str, task: int, reason: str) -> bool:
        """Record an unplayable task and return whether it is new. A group reports its task once per rollout."""
        is_new = (label, task) not in self._found
        self._found.setdefault((label, task), reason)
        return is_new

    def record(self, label: str, reason: str | None, message: str = "") -> str | None:
        """Count the outcome of a group.

        Args:
            label: label of its environment.
            reason: reason why its task is unplayable, or None if it was played.
            message: error of the task.

        Returns:
            Message for the user if too many tasks are unplayable, otherwise None. The missing groups of an incomplete
            window count as played.
        """
        window = self._windows[label]
        window.append(reason)
        reasons = Counter(found for found in window if found is not None)
        if reason is None or window.maxlen is None or reasons.total() <= MAX_RATIO * window.maxlen:
            return None
        counts = ", ".join(f"{name}: {count}" for name, count in reasons.most_common())
        return (
            f"{reasons.total()} of the last {len(window)} groups of environment {label!r} have unplayable tasks ({counts}; "
            f"the limit is {MAX_RATIO:.0%} of {window.maxlen}); increase seqLen for prompts that are too long, and correct or remove "
            f"the other rows. The latest: {message}"
        )


READ_SECONDS = 20.0
"""Time limit for the prompts of one environment. The orchestrator checks the others when they are drawn."""
NAMED = 3
"""Number of prompts named in a message."""


def count_unplayable(
    *,
    id: str,
    args: Mapping[str, object],
    folder: str,
    trust_remote_code: bool,
    seq_len: int,
    template_arguments: Mapping[str, object],
) -> list[str]:
    """Count the training prompts that no rollout can answer.

    Args:
        id: id of the environment.
        args: arguments of the environment.
        folder: folder of the model.
        trust_remote_code: whether the tokenizer may run its own code.
        seq_len: limit of a sample in tokens.
        template_arguments: arguments of the chat template.

    Returns:
        At most one sentence for people. Unusable data or an unusable tokenizer is reported by other checks.

    Raises:
        RoleError: most prompts leave no space, so the run would fail.
    """
    try:
        tasks = load_environment(id, args).tasks("train")
        chat = ChatTokens.load(folder, trust_remote_code=trust_remote_code).called_with(template_arguments)
    except (EnvironmentLoadError, TemplateError, OSError, ValueError):
        return []
    reasons, named, read = _count_unplayable(tasks, chat, seq_len)
    if not reasons:
        return []
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    message = f"of the first {read} of {len(tasks)} training prompts {counts} ({', '.join(named[:NAMED])})"
    if reasons.total() > MAX_RATIO * read:
        raise RoleError(f"{message}; increase seqLen, or remove these rows from the data", exit_codes.DATA)
    return [f"{message}; the run skips them. To train on them, increase seqLen"]


def _count_unplayable(tasks: Sequence[Task], chat: ChatTokens, seq_len: int) -> tuple[Counter[str], list[str], int]:
    """Count unplayable prompts within `READ_SECONDS`.

    Returns:
        Counts by reason, descriptions of the prompts, and the number of prompts read.
    """
    reasons, named, deadline = Counter[str](), list[str](), time.monotonic() + READ_SECONDS
    for index in range(len(tasks)):
        if time.monotonic() > deadline:
            return reasons, named, index
        try:
            task = tasks[index]
        except ValueError:
            continue  # a malformed row beyond the rows that the environment checks
        try:
            tokens = len(chat.opening(task.prompt)[1])
        except TemplateError as error:
            reasons["refused by the chat template"] += 1
            named.append(f"task {task.id!r}: {error}")
            continue
        if tokens >= seq_len:
            reasons[f"leave no room for a reply below seqLen ({seq_len})"] += 1
            named.append(f"task {task.id!r} has {tokens} tokens")
    return reasons, named, len(tasks)


def load_tokens(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatTokens:
    """Load the policy's tokenizer.

    Raises:
        RoleError: the tokenizer is missing or its chat template is unusable.
    """
    try:
        return ChatTokens.load(source, revision=revision, trust_remote_code=trust_remote_code)
    except (TemplateError, OSError, ValueError, KeyError) as error:
        reason = f"one of its files lacks the key {error}" if isinstance(error, KeyError) else str(error)
        raise RoleError(
            f"model: the tokenizer of {show_source(source)} is unusable: {reason}", exit_codes.DATA
        ) from error


def check_turns(place: str, template: ChatTemplate) -> str | None:
    """Render a conversation of two turns, and a tool turn.

    Args:
        place: field of the multi-turn environment, for messages.
        template: chat template with the environment's arguments.

    Returns:
        Warning if tool turns are unsupported, otherwise None.

    Raises:
        RoleError: the template cannot continue a conversation.
    """
    try:
        template.play_turns()
    except TemplateError as error:
        message = f"{place} may need several turns, but the model's chat template cannot render a second turn: {error}"
        raise RoleError(message, exit_codes.CONFIGURATION) from error
    if template.tool_form is None:
        return f"{place}: the chat template cannot render a tool turn; episodes that offer tools will fail"
    return None


def check_template(*, folder: str, trust_remote_code: bool, environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check the chat template of a model in the same way as the orchestrator at its start.

    Args:
        folder: folder of the model.
        trust_remote_code: whether the tokenizer may run its own code.
        environments: `place`, `id`, `args` and `template_arguments` of each environment; `here`: whether it can be
            loaded on this machine.

    Returns:
        Notices for people.

    Raises:
        RoleError: the run would be refused at its start.
    """
    chat = load_tokens(folder, trust_remote_code=trust_remote_code)
    notices: list[str] = []
    for environment in environments:
        try:
            template = chat.called_with(environment["template_arguments"]).template
        except TemplateError:
            continue  # `local.read_inputs.check_template_arguments` reports it
        try:
            warning = check_turns(environment["place"], template)
        except RoleError as error:
            if not environment["here"]:
                notices.append(
                    f"{error}. The environment is not installed on this machine: if it has a single turn, ignore this notice"
                )
            elif _may_ask_again(environment["id"], environment["args"]):
                raise
            continue
        if warning is not None and (not environment["here"] or _may_ask_again(environment["id"], environment["args"])):
            notices.append(warning)
    return notices


def _may_ask_again(id: str, args: Mapping[str, object]) -> bool:
    """Return whether an environment may need several turns. False for one that cannot be loaded, which another check
    reports.
    """
    try:
        environment = load_environment(id, args)
    except EnvironmentLoadError:
        return False
    return not (isinstance(environment, TellsTurns) and environment.single_turn is True)
