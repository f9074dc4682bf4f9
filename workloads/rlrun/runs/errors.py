"""Errors of a run as a Python object: one message for a person, and no traceback of what is below it in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.inspect.change import WordError
from rlrun.inspect.kubectl import ClusterError
from rlrun.inspect.source import NotFoundError

P = ParamSpec("P")
T = TypeVar("T")


class RunError(Exception):
    """Base of all errors of a `Run`."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows in the place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ManifestError(RunError, ValueError):
    """Error for a manifest that is not valid.

    Args:
        problems: each names field, value and fix.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)


class RunFailedError(RunError):
    """Error for a run that has failed or stopped while it was waited for; the message is that of `why()`."""


class WaitTimeoutError(RunError, TimeoutError):
    """Error for a wait that took too long; the run itself goes on."""


def translated(call: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors of readers, of the cluster and of this machine into a `RunError`."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except ConfigError as error:
            raise ManifestError(error.problems) from None
        except (ClusterError, NotFoundError, WordError) as error:
            raise RunError(str(error)) from None
        except OSError as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{error.filename or 'this machine'}: {error.strerror or error}") from None

    return called
