"""Calls of torch in the trainer and in these benchmarks, bound to the signatures of torch 2.11 as well as to those of the pinned version.

    python -m benchmarks.gpu.signatures --write

With torch 2.11 installed, --write makes `signatures_2_11.json`: what every function of the modules that are called from takes. Methods of
tensors are not looked at: their receiver's type is not known without running.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("signatures_2_11.json")
VERSION = "2.11"
CALLERS = ("workloads/rlrun/trainer", "workloads/rlrun/algorithms", "benchmarks/gpu", "tests/gpu")

SEVERAL_RANKS = {
    "torch.distributed.P2POp",
    "torch.distributed.all_gather_single",
    "torch.distributed.reduce_scatter_single",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor.Partial",
}
"""Called only where several ranks share a row or a model, which one GPU never does, some newer than 2.11; and a class that the table lacks,
whose constructor FSDP calls so in both versions."""


@dataclass(frozen=True)
class Call:
    """A call of a function of torch."""

    function: str
    where: str
    positional: int
    keywords: tuple[str, ...]
    open: bool
    """It passes `*args` or `**keywords`: only what is named is bound."""


def calls(files: Iterable[Path]) -> Iterator[Call]:
    """Every call of a name that an import of torch has brought."""
    for file in files:
        tree = ast.parse(file.read_text())
        names = dict(_imported(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            function = _dotted(node.func, names)
            if (
                function is None
                or not function.startswith("torch.")
                or function.startswith(("torch.ops.", "torch.Tensor."))
            ):
                continue
            yield Call(
                function,
                f"{file.relative_to(ROOT)}:{node.lineno}",
                sum(not isinstance(one, ast.Starred) for one in node.args),
                tuple(one.arg for one in node.keywords if one.arg is not None),
                any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords),
            )


def callers() -> list[Path]:
    """The files whose calls are looked at."""
    return sorted(file for folder in CALLERS for file in (ROOT / folder).rglob("*.py"))


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield name, alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        outer = _dotted(node.value, names)
        return None if outer is None else f"{outer}.{node.attr}"
    return None


def resolve(function: str) -> Any:
    """The object of a dotted name.

    Raises:
        AttributeError: there is none.
    """
    parts = function.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(function)


def signatures(function: str, stubs: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Signatures of a function, one text per overload; None where they are not known.

    Raises:
        AttributeError: torch has no such function.
    """
    found = resolve(function)
    module, _, name = function.rpartition(".")
    if module in ("torch", "torch.nn.functional") and name in stubs and isinstance(found, types.BuiltinFunctionType):
        return list(stubs[name])
    try:
        return [_bare(inspect.signature(found))]
    except (TypeError, ValueError):
        return None


def _bare(signature: inspect.Signature) -> str:
    """Names and kinds, without types; a default is `...`."""
    parameters = [
        one.replace(annotation=one.empty, default=one.default if one.default is one.empty else ...)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def builtin_stubs() -> dict[str, list[str]]:
    """Overloads of torch's functions in C++, from the stubs in its package."""
    import torch

    found: dict[str, list[str]] = {}
    for name in ("_nn", "_VariableFunctions"):
        file = Path(torch.__file__).parent / "_C" / f"{name}.pyi"
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(f"({ast.unparse(_without_types(node.args))})")
    return found


def _without_types(arguments: ast.arguments) -> ast.arguments:
    """The same names and kinds; a default is `...`."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for one in every:
        if one is not None:
            one.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [None if one is None else ast.Constant(...) for one in arguments.kw_defaults]
    return arguments


def binds(call: Call, overloads: Sequence[str]) -> bool:
    """Fit of a call to at least one signature."""
    return any(_binds(call, text) for text in overloads)


def _binds(call: Call, text: str) -> bool:
    signature = inspect.signature(eval(f"lambda {text[1:-1]}: None", {}))
    keywords = dict.fromkeys(call.keywords)
    try:
        (signature.bind_partial if call.open else signature.bind)(*[None] * call.positional, **keywords)
    except TypeError:
        return False
    return True


def table(functions: Iterable[str]) -> dict[str, list[str] | None]:
    """Signatures of the installed torch: of the functions, and of all others in the modules that they are from."""
    stubs = builtin_stubs()
    found: dict[str, list[str] | None] = {}
    modules = {function.rpartition(".")[0] for function in functions}
    names = set(functions)
    for module in modules:
        try:
            public = importlib.import_module(module)
        except ImportError:  # a class
            continue
        names |= {f"{module}.{name}" for name in vars(public) if _listed(public, name)}
    for name in sorted(names):
        try:
            found[name] = signatures(name, stubs)
        except AttributeError:
            continue
    return found


def _listed(module: Any, name: str) -> bool:
    value = getattr(module, name)
    if name.startswith("_") or not callable(value):
        return False
    return not inspect.isclass(value) or str(getattr(value, "__module__", "")).startswith("torch.nn.modules")


def main() -> None:
    """Entry point."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"make {TABLE.name}; needs torch {VERSION}")
    arguments = parser.parse_args()
    if arguments.write and not torch.__version__.startswith(f"{VERSION}."):
        parser.error(
            f"--write needs torch {VERSION}, and this is {torch.__version__}; install torch=={VERSION}.0 beside"
        )
    found = table({call.function for call in calls(callers())})
    if arguments.write:
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        TABLE.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(found)} functions of torch {torch.__version__}, {TABLE.stat().st_size if TABLE.exists() else 0} bytes")


if __name__ == "__main__":
    main()
