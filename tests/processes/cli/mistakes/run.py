"""Make each mistake in one process: `python -m tests.processes.cli.mistakes.run FOLDER`; prints one JSON line per mistake.

The tests' own process may have loaded torch and others; here nothing may load them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import yaml

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRun
from rlrun.cli import evaluation, main, rl, role_commands, sft
from rlrun.local import user_code
from tests.processes.cli.mistakes.mistake import MANIFEST, SFT, TOML, Files, Mistake
from tests.processes.cli.mistakes.outcome import Outcome
from tests.processes.cli.mistakes.table import MISTAKES

PROGRAMS: Mapping[str, Callable[[], int]] = {
    "rlrun": main.main,
    "rl": rl.main,
    "sft": sft.main,
    "eval": evaluation.eval_main,
    "synthesize": evaluation.synthesize_main,
    "trainer": role_commands.trainer,
    "orchestrator": role_commands.orchestrator,
    "inference": role_commands.inference,
}
HEAVY = frozenset({"torch", "vllm", "transformers", "verifiers"})
_check = user_code.check_subjects
WORKER = "rlrun.environments.process.worker"


class Started(BaseException):
    """Slow work was started. Not an Exception, so that no handler catches it."""


class Heavy(MetaPathFinder, Loader):
    """Import hook that refuses slow modules but finds their specifications."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in HEAVY else None

    def exec_module(self, module: ModuleType) -> NoReturn:
        raise Started(f"import {module.__name__}")


class Process(subprocess.Popen[Any]):
    """Replacement of subprocesses; only the process that checks an environment's arguments may start."""

    def __init__(self, words: Any, *rest: Any, **named: Any) -> None:
        if WORKER not in words:
            raise Started(str(words))
        super().__init__(words, *rest, **named)


def _replaced(*words: Any) -> NoReturn:
    raise Started(str(words))


def make(mistake: Mistake, folder: Path) -> Outcome:
    """Run the command line of a mistake in a new folder."""
    folder.mkdir()
    _write(folder, _correct() | dict(mistake.files))
    before = _content(folder)
    words = shlex.split(mistake.words)
    out, err = io.StringIO(), io.StringIO()
    began = _cpu_seconds()
    with _at(folder, words, mistake.variables), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _code(PROGRAMS[words[0]])
    seconds = _cpu_seconds() - began
    made = sorted(_content(folder) - before)
    return Outcome(
        mistake.what, code, err.getvalue(), made, round(seconds, 3), out.getvalue(), _repaired(mistake, folder)
    )


def _repaired(mistake: Mistake, folder: Path) -> str | None:
    """Run the command again with the message's fix; return None if it succeeded or if there is no mechanical fix."""
    if not mistake.repairs:
        return None
    words, files = mistake.words, _correct() | dict(mistake.files)
    name = next((one for one in mistake.files), "")
    for old, new in mistake.repairs:
        content = files[name] if name and old not in words else None
        if isinstance(content, str) and content.count(old) == 1:
            files[name] = content.replace(old, new)
        elif words.count(old) == 1:
            words = words.replace(old, new)
        else:
            return f"{old!r} does not occur exactly once"
    again = make(replace(mistake, words=words, files=files, repairs=()), folder.with_name(f"{folder.name}-repaired"))
    return None if again.code == 0 else f"code {again.code}: {again.err}"


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children; wall time would include other work of the machine."""
    return sum(os.times()[:4])


@functools.cache
def _correct() -> dict[str, str]:
    """Return files with which each command works."""
    spec = RLRun.model_validate(yaml.safe_load(MANIFEST)).spec
    config = resolve_spec(spec, name="quick", uid="00000000-0000-0000-0000-000000000000", output_dir="runs/quick")
    return {"run.yaml": MANIFEST, "run.toml": TOML, "sft.yaml": SFT, "run.json": config.model_dump_json()}


_answers: dict[str, tuple[Any, list[str]]] = {}
"""Responses of environments' processes, with their notices, by command and limits."""


def _checked(subjects: Sequence[Any], notice: Callable[[int, str], None]) -> list[Any]:
    """Return responses of environments' processes; all mistakes with the same environment share one process."""
    for subject in subjects:
        if repr(subject) not in _answers:
            said: list[str] = []
            found = _check([subject], lambda _index, text, said=said: said.append(text))
            _answers[repr(subject)] = found[0], said
    for index, subject in enumerate(subjects):
        for text in _answers[repr(subject)][1]:
            notice(index, text)
    return [_answers[repr(subject)][0] for subject in subjects]


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@contextlib.contextmanager
def _at(folder: Path, words: list[str], variables: Mapping[str, str]) -> Iterator[None]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLRUN_", "PRIME_"))}
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, kept | dict(variables), clear=True),
        mock.patch.object(os, "execve", _replaced),
        mock.patch.object(subprocess, "Popen", Process),
        mock.patch.object(user_code, "check_subjects", _checked),
    ):
        yield


def _code(program: Callable[[], int]) -> int | None:
    try:
        return program()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else None
    except (Exception, Started):
        traceback.print_exc()
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Heavy())
    for number, one in enumerate(MISTAKES):
        print(json.dumps(asdict(make(one, Path(sys.argv[1]) / str(number)))), flush=True)
