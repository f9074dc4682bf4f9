"""Errors of `Run`: one message for people, without a traceback of internal calls in a notebook."""

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
        """Lines that IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ManifestError(RunError, ValueError):
    """Error for an invalid manifest.

    Args:
        problems: problems with field, value and fix.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)


class RunFailedError(RunError):
    """Error for a run that failed or stopped during a wait. The message is the text of `why()`."""


class WaitTimeoutError(RunError, TimeoutError):
    """Error for a wait that timed out; the run itself continues."""


def translate_errors(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that errors of readers, the cluster and this machine become a `RunError`."""

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
