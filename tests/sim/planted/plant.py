"""Planting of one bug."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

Plant = Callable[[contextlib.ExitStack], None]


def put(stack: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    """Replace an attribute of the operator while the bug is planted."""
    stack.enter_context(mock.patch.object(owner, name, new))
