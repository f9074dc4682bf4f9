"""The command that installs further packages of RLRun from the place that this installation comes from.

RLRun is on no public index: there, its name may belong to anyone. The place is in `direct_url.json` of the distribution
(https://packaging.python.org/en/latest/specifications/direct-url/).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import rlrun

_NAME = "rlrun"
UNKNOWN_SOURCE = "CHECKOUT_OR_WHEEL"
"""Stands for a place that is gone, such as the sources that an image was built from."""
_CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]*@")


def install_extras(extras: str, *, options: str = "") -> str:
    """Command that installs extras of this installation.

    Args:
        extras: names with commas between them.
        options: words before the requirement, such as `--no-build-isolation`.
    """
    return _words(options, *_requirement(extras))


def install_package(requirement: str, *, options: str = "") -> str:
    """Command that installs a package of the public index."""
    return _words(options, requirement)


def uninstall_package(name: str) -> str:
    """Command that removes a package."""
    return f"{_installer(verb='uninstall')} {name}"


def _words(options: str, *requirement: str) -> str:
    return " ".join([_installer(), *options.split(), *(shlex.quote(word) for word in requirement)])


def _installer(verb: str = "install") -> str:
    """The program that installs into this Python: `pip` if it is the first one on PATH."""
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


def _requirement(extras: str) -> list[str]:
    """Words of pip for this distribution with extras."""
    source = _direct_url()
    if source is None:
        checkout = Path(rlrun.__file__).parents[2]
        if (checkout / "pyproject.toml").is_file():
            return ["-e", f"{checkout}[{extras}]"]
        with suppress(importlib.metadata.PackageNotFoundError):
            return [f"{_NAME}[{extras}]=={importlib.metadata.version(_NAME)}"]  # of an index of the user's own
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
    """Place that the distribution was installed from; None: an index, or no installation."""
    with suppress(importlib.metadata.PackageNotFoundError, OSError, ValueError):
        document = json.loads(importlib.metadata.distribution(_NAME).read_text("direct_url.json") or "null")
        if isinstance(document, dict):
            return document
    return None
