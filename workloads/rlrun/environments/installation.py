"""Installation of an environment's package into a Python of its own, which `environments[].python` then names.

Pip does it, with its own configuration (`PIP_INDEX_URL`, `PIP_FIND_LINKS`, ...). Of a hub, the environment itself comes from the owner's
index and nothing else does: with two indexes together pip would take the higher version of any name, whoever has published it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WORKER_REQUIREMENT = "pydantic>=2.12,<3"
"""Package that RLRun's part of an environment's process imports; the rest of RLRun need not be there."""
OWNER = "{owner}"
"""Stands for the owner's name in the address of a hub's index."""
_OF_HUB = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(?:@(?P<version>[\w.+!-]+))?")
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)\s*(?:\[[^]]*\])?\s*(?:[<>=!~;@].*)?")
_OTHER_PLACES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
_PROBE = """
import importlib.metadata as found, importlib.util, json, sys
own = found.distribution(sys.argv[1])
tops = {f.parts[0].removesuffix(".py") for f in own.files or () if f.suffix == ".py" and f.parts[0] != ".."}
there = {d.metadata["Name"].lower(): d.version for d in found.distributions() if d.metadata["Name"]}
modules = sorted(t for t in tops if t.isidentifier() and importlib.util.find_spec(t))
print(json.dumps({"version": own.version, "modules": modules, "verifiers": there.get("verifiers")}))
"""


class InstallError(Exception):
    """It cannot be installed; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """Origin of an environment's package."""

    name: str
    """Name of the package."""
    requirement: str
    """Requirement that pip is asked for."""
    index: str | None = None
    """Index that alone may have it; None: pip's own."""


@dataclass(frozen=True)
class Installed:
    """An environment's package in its Python."""

    name: str
    version: str
    python: Path
    """The interpreter, as `environments[].python` names it."""
    modules: tuple[str, ...]
    """Its top-level modules."""
    verifiers: str | None
    """Version of verifiers beside it, if any."""

    @property
    def module(self) -> str:
        """The module of the package's own name, or the first one."""
        own = re.sub(r"[-_.]+", "_", self.name).lower()
        return own if own in self.modules else self.modules[0]

    @property
    def id(self) -> str:
        """Id of the environment in a manifest; of another package than one of verifiers its function is for the user to name."""
        return f"verifiers:{self.module.replace('_', '-')}" if self.verifiers else f"{self.module}:FUNCTION"


def source_of(text: str, hub: str | None) -> Source:
    """The package that a text names: a wheel, a folder, `owner/name@version` of a hub, or a requirement of pip's.

    Args:
        text: as a user writes it.
        hub: address of the hub's index, with `{owner}`.

    Raises:
        InstallError: it names none of these, or a hub that is not known.
    """
    path = Path(text).expanduser()
    if path.exists() and (path.is_file() or "/" in text or text in (".", "..")):
        return Source(_name_at(path), str(path.resolve()))
    if text.startswith((".", "/", "~")) or (text.endswith((".whl", ".tar.gz", ".zip")) and "://" not in text):
        raise InstallError(f"got {text!r}, and there is no such file or folder")
    if (found := _OF_HUB.fullmatch(text)) is not None:
        if hub is None:
            raise InstallError(
                f"{text} is of a hub, whose address is not known; give its index with --hub 'https://HUB/{OWNER}/simple/' or in "
                "RLRUN_ENVIRONMENT_HUB"
            )
        if OWNER not in hub or not hub.startswith(("https://", "http://")):
            raise InstallError(
                f"got {hub!r} as the hub's index, expected an address with {OWNER}, such as https://HUB/{OWNER}/simple/"
            )
        version = f"=={found['version']}" if found["version"] else ""
        return Source(found["name"], found["name"] + version, hub.replace(OWNER, found["owner"]))
    if (found := _REQUIREMENT.fullmatch(text)) is not None:
        return Source(found["name"], text)
    raise InstallError(
        f"got {text!r}, expected a wheel, a folder with pyproject.toml, owner/name@version of a hub, or a requirement such as "
        "word-chain==1.2"
    )


def _name_at(path: Path) -> str:
    """Name of the package in a file or a folder."""
    if path.is_file():
        return path.name.partition("-")[0]
    project = path / "pyproject.toml"
    try:
        name = tomllib.loads(project.read_text())["project"]["name"]
    except FileNotFoundError:
        raise InstallError(f"{path} has no pyproject.toml, and so is no package; name its folder or a wheel") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InstallError(f"{project} names no project ({error}); set [project] name") from None
    return str(name)


def install_environment(
    source: Source,
    folder: Path,
    *,
    python: str = sys.executable,
    beside: Sequence[str] = (),
    replace: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Installed:
    """Make a virtual environment in `folder` with the package in it. Where that fails, the folder is not there.

    Args:
        source: the package.
        folder: new; an existing one is refused, or with `replace` removed if it is a virtual environment.
        python: the interpreter to make it with.
        beside: more requirements of pip's.
        replace: see `folder`.
        say: gets a line for each part that takes time.

    Raises:
        InstallError: the folder is there, or a part fails; the message has pip's own words.
    """
    _make_way(folder, replace=replace)
    interpreter = folder / "bin" / "python"
    try:
        say(f"making a virtual environment in {folder}")
        has_pip = importlib.util.find_spec("pip") is not None
        _run_installer(
            [python, "-I", "-m", "venv", *(["--without-pip"] if has_pip else []), str(folder)],
            f"{python} makes no venv",
        )
        pip = (
            [sys.executable, "-I", "-m", "pip", "--python", str(interpreter)]
            if has_pip
            else [str(interpreter), "-I", "-m", "pip"]
        )
        with tempfile.TemporaryDirectory() as fetched:
            wanted = source.requirement
            if source.index is not None:
                say(f"fetching {wanted} from {source.index}")
                wanted = _fetch_wheel(pip, source, Path(fetched))
            say(f"installing {source.requirement} with its packages")
            _run_installer(
                [*pip, "install", "--quiet", wanted, *beside, WORKER_REQUIREMENT],
                f"pip cannot install {source.requirement}",
            )
        return _looked_at(source.name, interpreter)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_way(folder: Path, *, replace: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "pyvenv.cfg").is_file():
        raise InstallError(f"{folder} is there and is no virtual environment; choose another folder with --into")
    if not replace:
        raise InstallError(f"{folder} is there already; --replace makes it anew, --into names another folder")
    shutil.rmtree(folder)


def _fetch_wheel(pip: Sequence[str], source: Source, folder: Path) -> str:
    """The package's wheel, from its index alone."""
    index = ["--index-url", str(source.index), "--no-deps", "--only-binary", ":all:"]
    failed = f"{source.index} has no wheel of {source.requirement}"
    # Other places that pip is set to look at must not offer the name. Variables such as PIP_CERT stay.
    environ = {name: value for name, value in os.environ.items() if name not in _OTHER_PLACES}
    environ["PIP_CONFIG_FILE"] = os.devnull
    _run_installer([*pip, "download", "--quiet", *index, "--dest", str(folder), source.requirement], failed, environ)
    (wheel,) = folder.iterdir()
    return str(wheel)


def _looked_at(name: str, interpreter: Path) -> Installed:
    said = _run_installer(
        [str(interpreter), "-c", _PROBE, name], f"{interpreter} does not find {name} after it was installed"
    )
    found = json.loads(said)
    modules = tuple(map(str, found["modules"]))
    if not modules:
        raise InstallError(f"the package {name} has no Python module, and so is no environment")
    verifiers = found["verifiers"]
    return Installed(name, str(found["version"]), interpreter, modules, None if verifiers is None else str(verifiers))


def _run_installer(command: Sequence[str], failed: str, environ: Mapping[str, str] | None = None) -> str:
    """Standard output of a command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environ)
    except OSError as error:
        raise InstallError(f"{failed}: {error}") from None
    if done.returncode != 0:
        told = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in told if line.startswith("ERROR")] or told[-3:]
        raise InstallError(f"{failed}: {'; '.join(errors[:3]) or f'exit code {done.returncode}'}")
    return done.stdout
