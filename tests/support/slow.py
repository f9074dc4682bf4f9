"""Processes under test that are slow: `RLRUN_TEST_SLOW=0.3-1.5` shows which tests ask for what is yet to come.

A test passes on a fast machine although it asks too early. With the variable each write of an operator under test, each event that it
watches and each answer of a page's server waits a random time of so many seconds, and tests wait for longer.
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
    """A program that is slow where the variable asks for that.

    Args:
        main: Python code.
        slow_down: function, with its module, that is called before with the least and the most seconds.
    """
    if SLOW not in os.environ:
        return main
    module, _, name = slow_down.rpartition(".")
    least, most = seconds(os.environ[SLOW])
    return f"from {module} import {name}; {name}({least}, {most}); {main}"


def patience() -> float:
    """How many times as long as usual a test waits for a process."""
    return 4.0 if SLOW in os.environ else 1.0


def seconds(text: str) -> tuple[float, float]:
    """Least and most of a range.

    Raises:
        ValueError: it is none.
    """
    found = _RANGE.fullmatch(text)
    if found is None or float(found[1]) > float(found[2]):
        raise ValueError(f"{SLOW}: {text!r} is no range of seconds; write it like 0.3-1.5")
    return float(found[1]), float(found[2])


def slow_answers(least: float, most: float) -> None:
    """Let every answer of this process's HTTP server wait `least` to `most` seconds."""
    import uvicorn

    take = uvicorn.Config.__init__

    def late(self: uvicorn.Config, app: Any, *rest: Any, **more: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await asyncio.sleep(random.uniform(least, most))
            await app(scope, receive, send)

        take(self, answer, *rest, **more)

    uvicorn.Config.__init__ = late  # type: ignore[method-assign]
