"""Slow processes under test: `RLRUN_TEST_SLOW=0.3-1.5` finds tests that check a state before it exists.

Such a test passes on a fast machine. With the variable, each write of an operator under test, each event that it
watches and each answer of a page's server is delayed by a random time in this range, and tests wait longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from typing import Any

SLOW = "RLRUN_TEST_SLOW"
"""Variable with the least and the most seconds of a delay."""
_RANGE = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")


def program(main: str, slow_down: str) -> str:
    """Return a program that is slow if the variable is set.

    Args:
        main: Python code.
        slow_down: function with its module, called first with the least and the most seconds.
    """
    if SLOW not in os.environ:
        return main
    module, _, name = slow_down.rpartition(".")
    least, most = seconds(os.environ[SLOW])
    return f"from {module} import {name}; {name}({least}, {most}); {main}"


def patience() -> float:
    """Return the factor for a test's waits for a process."""
    return 4.0 if SLOW in os.environ else 1.0


def seconds(text: str) -> tuple[float, float]:
    """Parse the least and the most seconds of a range.

    Raises:
        ValueError: the text is not a range.
    """
    found = _RANGE.fullmatch(text)
    if found is None or float(found[1]) > float(found[2]):
        raise ValueError(f"{SLOW}: {text!r} is no range of seconds; write it like 0.3-1.5")
    return float(found[1]), float(found[2])


def slow_answers(least: float, most: float) -> None:
    """Delay every answer of this process's HTTP server by `least` to `most` seconds."""
    import uvicorn

    take = uvicorn.Config.__init__

    def late(self: uvicorn.Config, app: Any, *rest: Any, **more: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await asyncio.sleep(random.uniform(least, most))
            await app(scope, receive, send)

        take(self, answer, *rest, **more)

    uvicorn.Config.__init__ = late  # type: ignore[method-assign]
