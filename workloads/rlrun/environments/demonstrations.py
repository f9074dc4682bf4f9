"""Demonstrations of an environment in a file, for the warm-up of a tiny model.

In a pod, the environment's code runs in its own init container, which has no secret of the run. The container that creates the model
reads the file and does not import the environment.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from rlrun.environments.bounds import plain_messages
from rlrun.environments.protocol import Demonstrates, Message
from rlrun.environments.registry import load_environment
from rlrun.protocol.files.durable import write_bytes

WARMUP_BATCH = 64
"""Demonstrations per supervised step."""
MAX_BYTES = 256 * 1024**2
"""Largest file that is read. The limit is needed because code of the environment can write the file."""


def collect_demonstrations(environment_id: str, args: Mapping[str, object], count: int) -> list[list[Message]]:
    """Return ideal conversations of the last tasks of the train split. RL starts with the first tasks of that split.

    Args:
        environment_id: environment to load.
        args: arguments of the environment.
        count: largest number of conversations; each task has one.

    Raises:
        ValueError: the environment has no demonstrations.
        rlrun.environments.registry.EnvironmentLoadError: the environment does not exist, or rejects its arguments.
    """
    environment = load_environment(environment_id, dict(args))
    if not isinstance(environment, Demonstrates):
        raise ValueError(f"model.tiny.warmupEnvironment: {environment_id} has no demonstrations to learn from")
    tasks = environment.tasks("train")
    found = []
    for number in range(min(count, len(tasks))):
        task = tasks[len(tasks) - 1 - number]
        found.append([*task.prompt, *environment.demonstration(task)])
    return found


def write_demonstrations(file: Path, conversations: list[list[Message]]) -> None:
    """Write conversations to a file, which becomes visible only after it is complete."""
    plain = [plain_messages(conversation) for conversation in conversations]
    write_bytes(file, json.dumps({"conversations": plain}).encode())


def read_demonstrations(file: Path) -> list[list[Message]]:
    """Return the conversations of a file that untrusted code may have written.

    Raises:
        ValueError: the file is missing, too large, not a regular file, or has other content. The message quotes no content.
    """
    try:
        # O_NOFOLLOW: a link could lead to a file that its writer cannot read. O_NONBLOCK: the path could be a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"cannot read the demonstrations {file}: {error.strerror}") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
            raise ValueError(f"the demonstrations {file} are not a regular file of at most {MAX_BYTES} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            text = opened.read(MAX_BYTES)
    finally:
        os.close(descriptor)
    try:
        document = json.loads(text)
        conversations = [plain_messages(conversation) for conversation in document["conversations"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"the demonstrations {file} do not contain conversations") from None
    if not all(isinstance(m.get("content"), str) for c in conversations for m in c):
        raise ValueError(f"the demonstrations {file} contain a message without text")
    return conversations
