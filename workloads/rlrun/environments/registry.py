"""Environments by id: `reverse-text`, `my_package.module:function` or `verifiers:<taskset>`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rlrun.config.suggest import did_you_mean
from rlrun.custom import add_code_folder
from rlrun.environments.bounds import describe_exception
from rlrun.environments.protocol import SPLITS, Environment, VerifiersLoadError
from rlrun.protocol.files.failures import AbsentDataError, RoleError
from rlrun.runtime.extras import install_extras

if TYPE_CHECKING:
    from pydantic import BaseModel

VERIFIERS = "verifiers:"


class EnvironmentLoadError(ValueError):
    """Error for an environment that cannot be loaded. The message contains its name, the reason and the fix."""


ArgsT = TypeVar("ArgsT", bound="BaseModel")


class _Bundled(Protocol):
    """A bundled environment, with arguments of any type."""

    @property
    def args(self) -> type[BaseModel]: ...

    @property
    def title(self) -> str: ...

    def load(self, id: str, args: Mapping[str, object]) -> Environment: ...


@dataclass(frozen=True)
class _Shipped(Generic[ArgsT]):
    args: type[ArgsT]
    build: Callable[[ArgsT], Environment]

    @property
    def title(self) -> str:
        """One line about the task and the reward."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]

    def load(self, id: str, args: Mapping[str, object]) -> Environment:
        """Create the environment with validated arguments, and check that both splits have a task. Raises `EnvironmentLoadError`."""
        checked = check_args(id, self.args, args)
        try:
            environment = self.build(checked)
            for split in SPLITS:
                environment.tasks(split)[0]
        except (RoleError, ValueError, KeyError) as error:
            raise EnvironmentLoadError(f"environment {id!r}: {error}") from _missing_here(error)
        return environment


def _reverse_text() -> _Bundled:
    from rlrun.environments.bundled.small_tasks import ReverseText, ReverseTextArgs

    return _Shipped[ReverseTextArgs](ReverseTextArgs, ReverseText)


def _make_arithmetic() -> _Bundled:
    from rlrun.environments.bundled.small_tasks import Arithmetic, ArithmeticArgs

    return _Shipped[ArithmeticArgs](ArithmeticArgs, Arithmetic)


def _make_calculator() -> _Bundled:
    from rlrun.environments.bundled.small_tasks import Calculator, CalculatorArgs

    return _Shipped[CalculatorArgs](CalculatorArgs, Calculator)


def _make_gsm8k() -> _Bundled:
    from rlrun.environments.bundled.dataset import Gsm8k, Gsm8kArgs

    return _Shipped[Gsm8kArgs](Gsm8kArgs, Gsm8k)


def _make_dataset() -> _Bundled:
    from rlrun.environments.bundled.dataset import Dataset, DatasetArgs

    return _Shipped[DatasetArgs](DatasetArgs, Dataset)


SHIPPED: Mapping[str, Callable[[], _Bundled]] = {
    "reverse-text": _reverse_text,
    "arithmetic": _make_arithmetic,
    "calculator": _make_calculator,
    "gsm8k": _make_gsm8k,
    "dataset": _make_dataset,
}
"""Bundled environments by id. Each one is imported only when used: an environment's process loads one, usually none of these."""


def known_environments() -> dict[str, str]:
    """Return one line about the task and the reward of each bundled environment, by id."""
    return {id: bundled().title for id, bundled in SHIPPED.items()}


def load_environment(id: str, args: Mapping[str, object]) -> Environment:
    """Load an environment.

    Args:
        id: id of a bundled environment; `package.module:function`, called as `function(**args)`; or `verifiers:<taskset id>`.
        args: arguments of the environment.

    Raises:
        EnvironmentLoadError: the environment does not exist, or its arguments are invalid.
    """
    if id.startswith(VERIFIERS):
        return _load_verifiers(id, args)
    if ":" in id:
        return _load_function(id, args)
    bundled = SHIPPED.get(id)
    if bundled is None:
        raise EnvironmentLoadError(
            f"unknown environment {id!r}{did_you_mean(id, SHIPPED)}. Shipped: {', '.join(SHIPPED)}. "
            "Other ids are 'package.module:function' (your own environment) or 'verifiers:<taskset id>'"
        )
    return bundled().load(id, args)


def _missing_here(error: Exception) -> BaseException | None:
    """Return the cause if the pods of a run may have the missing part: a package, a file with an absolute path, or data of a hub."""
    if isinstance(error.__cause__, ImportError):
        return error.__cause__
    is_absent = isinstance(error, AbsentDataError) or (
        isinstance(error, RoleError) and isinstance(error.__cause__, FileNotFoundError)
    )
    return error if is_absent else None


def check_args(id: str, model: type[ArgsT], args: Mapping[str, object]) -> ArgsT:
    """Validate arguments. Raises `EnvironmentLoadError` with each invalid argument and the valid names."""
    from pydantic import (
        ValidationError,
    )  # imported here because the process of a user's own environment does not need it

    try:
        return model.model_validate(dict(args))
    except ValidationError as error:
        problems = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                problems.append(f"no argument {name!r}{did_you_mean(name, model.model_fields)}")
            else:
                problems.append(f"argument {name!r} = {item['input']!r}: {item['msg']}")
        raise EnvironmentLoadError(
            f"environment {id!r}: {'; '.join(problems)}. Arguments: {_describe_args(model)}"
        ) from None


def _load_function(id: str, args: Mapping[str, object]) -> Environment:
    module_name, _, function_name = id.partition(":")
    try:
        add_code_folder()
        module = importlib.import_module(module_name)
    except BaseException as error:
        raise EnvironmentLoadError(
            f"environment {id!r}: importing {module_name!r} failed with {describe_exception(error)}. "
            "Install the package in the Python that runs the environment"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise EnvironmentLoadError(
            f"environment {id!r}: module {module_name!r} has no function {function_name!r}"
            f"{did_you_mean(function_name, names)}"
        )
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := [name for name in args if name not in parameters]):
        described = ", ".join(str(parameter) for parameter in parameters.values()) or "none"
        problems = "; ".join(f"no argument {name!r}{did_you_mean(name, parameters)}" for name in unknown)
        raise EnvironmentLoadError(f"environment {id!r}: {problems}. Arguments: {described}")
    try:
        environment = function(**args)
    except BaseException as error:
        raise EnvironmentLoadError(
            f"environment {id!r}: {function_name}() raised {describe_exception(error)}"
        ) from error
    if not isinstance(environment, Environment):
        lacking = [name for name in ("id", "tasks", "run", "score") if not hasattr(environment, name)]
        raise EnvironmentLoadError(
            f"environment {id!r}: {function_name}() returned {type(environment).__name__}, which lacks "
            f"{', '.join(lacking)}: return an object with the interface rlrun.environments.Environment"
        )
    return environment


def _load_verifiers(id: str, args: Mapping[str, object]) -> Environment:
    """Load with the adapter for the installed version of verifiers: 0.1 and later versions have different interfaces."""
    from importlib import metadata

    name = id.removeprefix(VERIFIERS)
    try:
        version = metadata.version("verifiers")
        if version.startswith("0.1."):
            from rlrun.environments.adapters.verifiers_legacy import LegacyArgs, LegacyVerifiersEnvironment

            return LegacyVerifiersEnvironment(id, name, check_args(id, LegacyArgs, args))
        from rlrun.environments.adapters.verifiers_adapter import VerifiersArgs, VerifiersEnvironment

        return VerifiersEnvironment(id, name, check_args(id, VerifiersArgs, args))
    except ImportError as error:
        raise EnvironmentLoadError(
            f"environment {id!r} needs the package verifiers 0.4.0 or 0.1.14, which cannot be imported ({error}). "
            f"Install it, for example with: {install_extras('orchestrator')}"
        ) from error
    except VerifiersLoadError as error:
        raise EnvironmentLoadError(f"environment {id!r}: {error}") from error


def _describe_args(model: type[BaseModel]) -> str:
    described = []
    for name, field in model.model_fields.items():
        type_name = getattr(field.annotation, "__name__", str(field.annotation))
        described.append(f"{name}: {type_name} = {field.get_default(call_default_factory=True)!r}")
    return ", ".join(described)
