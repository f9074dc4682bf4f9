"""Choice of the error to report if several tasks of the event loop failed."""

from __future__ import annotations

from rlrun.protocol.files.failures import RoleError


def first_cause(error: BaseException) -> BaseException:
    """Return the first `RoleError` inside an exception group, otherwise its first leaf."""
    leaves = _leaf_errors(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RoleError)), leaves[0])


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaf_errors(inner)]
    return [error]
