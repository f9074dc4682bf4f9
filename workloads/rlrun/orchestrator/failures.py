"""Choice of the error to report among several that ended the event loop's tasks."""

from __future__ import annotations

from rlrun.protocol.files.failures import RoleError


def first_cause(error: BaseException) -> BaseException:
    """The `RoleError` inside an exception group, else its first leaf."""
    leaves = _leaf_errors(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RoleError)), leaves[0])


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaf_errors(inner)]
    return [error]
