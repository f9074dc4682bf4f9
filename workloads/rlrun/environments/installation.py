"""Installation of an environment's package into its own virtual environment, which `environments[].python` then selects.

Pip installs it with the user's pip configuration (`PIP_INDEX_URL`, `PIP_FIND_LINKS`, ...). For a package of an environment hub, pip
downloads the environment itself only from its owner's index: with two indexes, pip would take the higher version of any name,
regardless of its publisher.
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
"""Requirement of RLRun's code in an environment's process. The other dependencies of RLRun are not needed there."""
OWNER = "{owner}"
"""Placeholder for the owner's name in the address of a hub's index."""
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
    """Error of an installation. The message contains the reason and a fix."""


@dataclass(frozen=True)
class Source:
    """Origin of an environment's package."""

    name: str
    """Package name."""
    requirement: str
    """Requirement for pip."""
    index: str | None = None
    """Only index from which the package may come. None: pip's configured indexes."""


@dataclass(frozen=True)
class Installed:
    """An installed environment's package."""

    name: str
    version: str
    python: Path
    """Interpreter for `environments[].python`."""
    modules: tuple[str, ...]
    """Top-level modules of the package."""
    verifiers: str | None
    """Version of the verifiers package in the same virtual environment, if any."""

    @property
    def module(self) -> str:
        """Module with the package's name, or else the first module."""
        own = re.sub(r"[-_.]+", "_", self.name).lower()
        return own if own in self.modules else self.modules[0]

    @property
    def id(self) -> str:
        """Id of the environment for a manifest. Without verifiers, the user has to replace `FUNCTION`."""
        return f"verifiers:{self.module.replace('_', '-')}" if self.verifiers else f"{self.module}:FUNCTION"


def source_of(text: str, hub: str | None) -> Source:
    """Return the package that a user's text names: a wheel, a folder, `owner/name@version` of a hub, or a pip requirement.

    Args:
        text: argument of the user.
        hub: address of the hub's index, with `{owner}`.

    Raises:
        InstallError: the text is not a package, or the hub's address is unknown.
    """
    path = Path(text).expanduser()
    if path.exists() and (path.is_file() or "/" in text or text in (".", "..")):
        return Source(_name_at(path), str(path.resolve()))
    if text.startswith((".", "/", "~")) or (text.endswith((".whl", ".tar.gz", ".zip")) and "://" not in text):
        raise InstallError(f"no file or folder {text!r}; give the path of a wheel or of a folder with pyproject.toml")
    if (found := _OF_HUB.fullmatch(text)) is not None:
        if hub is None:
            raise InstallError(
                f"the address of the hub for {text} is unknown; give its index with --hub 'https://HUB/{OWNER}/simple/' or in "
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
    """Package name of a file or a folder."""
    if path.is_file():
        return path.name.partition("-")[0]
    project = path / "pyproject.toml"
    try:
        name = tomllib.loads(project.read_text())["project"]["name"]
    except FileNotFoundError:
        raise InstallError(f"{path} has no pyproject.toml; give a folder that has one, or a wheel") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InstallError(f"{project} does not name its project ({error}); set [project] name") from None
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
    """Create a virtual environment in `folder` and install the package. If a step fails, the folder is deleted.

    Args:
        source: package to install.
        folder: new folder. An existing folder is an error; with `replace`, an existing virtual environment is deleted first.
        python: interpreter that creates the virtual environment.
        beside: additional requirements for pip.
        replace: whether to replace an existing virtual environment.
        say: function that receives one line before each slow step.

    Raises:
        InstallError: the folder exists, or a step fails. The message contains pip's error.
    """
    _make_way(folder, replace=replace)
    interpreter = folder / "bin" / "python"
    try:
        say(f"making a virtual environment in {folder}")
        has_pip = importlib.util.find_spec("pip") is not None
        _run_installer(
            [python, "-I", "-m", "venv", *(["--without-pip"] if has_pip else []), str(folder)],
            f"{python} cannot create a virtual environment",
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
        raise InstallError(f"{folder} exists and is not a virtual environment; choose another folder with --into")
    if not replace:
        raise InstallError(f"{folder} exists; replace it with --replace, or choose another folder with --into")
    shutil.rmtree(folder)


def _fetch_wheel(pip: Sequence[str], source: Source, folder: Path) -> str:
    """Download the package's wheel from its index only, and return the path."""
    index = ["--index-url", str(source.index), "--no-deps", "--only-binary", ":all:"]
    failed = f"{source.index} has no wheel of {source.requirement}"
    # Other configured indexes must not offer the package. Variables such as PIP_CERT are kept.
    environ = {name: value for name, value in os.environ.items() if name not in _OTHER_PLACES}
    environ["PIP_CONFIG_FILE"] = os.devnull
    _run_installer([*pip, "download", "--quiet", *index, "--dest", str(folder), source.requirement], failed, environ)
    (wheel,) = folder.iterdir()
    return str(wheel)


def _looked_at(name: str, interpreter: Path) -> Installed:
    output = _run_installer(
        [str(interpreter), "-c", _PROBE, name], f"{interpreter} cannot find {name} after the installation"
    )
    found = json.loads(output)
    modules = tuple(map(str, found["modules"]))
    if not modules:
        raise InstallError(f"the package {name} has no Python module; it cannot be an environment")
    verifiers = found["verifiers"]
    return Installed(name, str(found["version"]), interpreter, modules, None if verifiers is None else str(verifiers))


INSTALLER_SECONDS = 1800.0
"""Time limit of one command of an installation, in seconds. pip limits each connection, but not the work of `git` or of a build."""


def _run_installer(command: Sequence[str], failed: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=environ,
            timeout=INSTALLER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(
            f"{failed}: {command[0]} did not end within {INSTALLER_SECONDS:g} s; check the connection to the package index"
        ) from None
    except OSError as error:
        raise InstallError(f"{failed}: {error}") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise InstallError(f"{failed}: {'; '.join(errors[:3]) or f'exit code {done.returncode}'}")
    return done.stdout
