"""Count of prompts that leave no space for a reply, for `rlrun validate` with model and data on this machine.

The count needs the tokenizer, which the command line does not import, so it runs in a separate process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rlrun.environments.protocol import Task
from rlrun.environments.registry import EnvironmentLoadError, load_environment
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.unplayable import MAX_RATIO
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

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
