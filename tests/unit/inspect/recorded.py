"""Recorded cluster: output by `kubectl` words, and a log of all commands."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rlrun.inspect.kubectl import Answer, ClusterError, Kubectl

Json = dict[str, Any]
EMPTY: Json = {"kind": "List", "items": []}


class Recorded:
    """Responses by the words of a command. The first matching rule applies; a command without a matching rule fails."""

    def __init__(self, *rules: tuple[str, Json | str | Answer]) -> None:
        self.rules = list(rules)
        self.asked: list[list[str]] = []
        self.shown: list[list[str]] = []
        self.streams: dict[str, bytes] = {}
        """Words -> bytes that a command with these words streams."""
        self.receivers: dict[str, Callable[[bytes], Answer]] = {}
        """Words -> handler of the input that a command with these words receives."""

    def start(self, command: Sequence[str], _timeout: float) -> Answer:
        """Return the recorded response to one request."""
        self.asked.append(list(command))
        line = " ".join(command)
        for words, answer in self.rules:
            if words in line:
                if isinstance(answer, Answer):
                    return answer
                return Answer(0, answer if isinstance(answer, str) else json.dumps(answer), "")
        return Answer(1, "", f"error: nothing is recorded for {line}")

    def show(self, command: Sequence[str]) -> int:
        """Record a command that writes to the terminal."""
        self.shown.append(list(command))
        return 0

    @contextmanager
    def stream(self, command: Sequence[str]) -> Iterator[IO[bytes]]:
        """Stream recorded bytes."""
        self.asked.append(list(command))
        yield io.BytesIO(next(content for words, content in self.streams.items() if words in " ".join(command)))

    def kubectl(self, flags: Sequence[str] = ()) -> Kubectl:
        """Return the `kubectl` client of this cluster."""
        return Kubectl(flags, self.start, self.show, self.stream, self.send)

    def send(self, command: Sequence[str], write: Callable[[IO[bytes]], object]) -> None:
        """Pass the input to its handler."""
        self.asked.append(list(command))
        write(out := io.BytesIO())
        receive = next(one for words, one in self.receivers.items() if words in " ".join(command))
        answer = receive(out.getvalue())
        if answer.code:
            raise ClusterError(answer.err)


def of_run(run: Json, *more: tuple[str, Json | str | Answer], pods: Sequence[Json] = ()) -> Recorded:
    """Build a cluster with one run `a`."""
    return Recorded(
        *more,
        ("get rlruns.rlrun.io a", run),
        ("get rlruns.rlrun.io -o", {"items": [run]}),
        ("get rlruns.rlrun.io --all-namespaces", {"items": [run]}),
        ("get pods", {"items": list(pods)}),
        (
            "get leases",
            Answer(1, "", 'Error from server (NotFound): leases.coordination.k8s.io "a-progress" not found'),
        ),
        ("get events", EMPTY),
    )


def pod(name: str, role: str, *, attempt: int = 1, ready: bool = True, **container: Any) -> Json:
    """Build a pod of the run `a`."""
    own = {"name": role, "ready": ready, "state": {"running": {}}, "restartCount": 0} | container
    return {
        "metadata": {"name": name, "labels": {"rlrun.io/role": role, "rlrun.io/attempt": str(attempt)}},
        "spec": {"nodeName": "node-7"},
        "status": {"phase": "Running", "containerStatuses": [own]},
    }


PODS = [
    pod("a-trainer-0", "trainer"),
    pod("a-trainer-1", "trainer", ready=False, state={"waiting": {"reason": "ImagePullBackOff"}}),
    pod("a-inference-x", "inference", attempt=1, restartCount=2),
    pod("a-orchestrator-1", "orchestrator"),
]

Use = Callable[[Recorded], Recorded]
