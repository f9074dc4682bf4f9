"""Commands and tables of other projects' documentation, and their results here; see `documented.txt`."""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.cli import evaluation, rl, role_commands, sft
from rlrun.config.loading.problems import ConfigError
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import convert_settings
from rlrun.convert.readers.hydra import read_override
from tools.convert_corpus import corpus
from tools.docs_resource import cells
from tools.prime_rl_files import as_toml, files, nested, value_of

PROGRAMS: dict[str, Callable[[Sequence[str]], object]] = {
    "rl": rl.run_rl,
    "sft": sft.run,
    "eval": evaluation.run_eval,
    "trainer": role_commands.trainer,
    "orchestrator": role_commands.orchestrator,
    "inference": role_commands.inference,
}
_MODEL = {"model.name": "org/model"}
_ORCHESTRATOR = {"batch_size": 128, "rollouts_per_example": 16, "env[0].id": "reverse-text"}
STAND_INS: Mapping[str, Mapping[str, object]] = {
    "rl.toml": _MODEL | {"max_steps": 20} | {f"orchestrator.{name}": value for name, value in _ORCHESTRATOR.items()},
    "overlay.toml": {"max_steps": 30},
    "train.toml": _MODEL,
    "orch.toml": _MODEL | _ORCHESTRATOR,
    "infer.toml": _MODEL,
    "sft.toml": _MODEL | {"max_steps": 40, "data.name": "org/data", "data.batch_size": 32},
}


_SHOWN = 2
"""Number of reasons of one refusal on the page."""


@dataclass(frozen=True)
class Documented:
    """One command or table of a page."""

    project: str
    page: str
    kind: str
    """`command`, `toml`, `convert_settings` or `other`."""
    text: str


@dataclass(frozen=True)
class Outcome:
    """Result of a command or table."""

    kind: str
    """`starts`, `converted`, `refused` or `other`."""
    said: Sequence[str] = ()
    """Problems of a refused one, additions to a converted one, or the counterpart if it is not a configuration."""
    notices: int = 0


def documented() -> Iterator[Documented]:
    """Return all of them, in the order of the file."""
    text = Path(__file__).with_suffix(".txt").read_text()
    for block in text.split("\n== ")[1:]:
        head, *lines = block.strip().splitlines()
        project, page = head.split()
        for line in lines:
            kind, _, rest = line.partition(" ")
            known = kind in ("toml", "convert", "other")
            yield Documented(project, page, kind if known else "command", rest if known else line)


def outcome(one: Documented, folder: Path) -> Outcome:
    """Try a command or table in a folder for its files; return the result."""
    head, _, rest = one.text.partition(": ")
    if one.kind == "other":
        return Outcome("other", [rest])
    if one.kind == "convert":
        return _converted(head, rest.split())
    if one.kind == "toml":
        keys = {key: value_of(value) for key, _, value in (pair.partition(" = ") for pair in rest.split("; "))}
        (folder / "fragment.toml").write_text(as_toml(nested(keys)))
        return _tried(head, ["@", f"{head}.toml", "@", "fragment.toml"], folder)
    program, *words = shlex.split(one.text)
    return _tried(program, words, folder)


def documentation_rows(project: str) -> Iterator[str]:
    """Return a table of a project's commands and tables, for its page."""
    yield from ("| page | command or table | result |", "|---|---|---|")
    for one in documented():
        if one.project == project:
            with tempfile.TemporaryDirectory() as folder:
                result = outcome(one, Path(folder))
            text = one.text.rpartition(": ")[0] if one.kind == "other" else one.text
            yield cells(one.page, f"`{text}`", _shown(result))


def _shown(result: Outcome) -> str:
    said = "; ".join(
        line.removeprefix("command line: ").removeprefix("fragment.toml:") for line in result.said[:_SHOWN]
    )
    if result.kind == "other":
        return f"here: {said}"
    if result.kind == "refused":
        more = len(result.said) - _SHOWN
        return f"refused: {said}" + (f"; and {more} more" if more > 0 else "")
    notes = {0: "", 1: ", with a note"}.get(result.notices, f", with {result.notices} notes")
    return result.kind + notes + (f"; to add: {said}" if said else "")


def _tried(program: str, words: Sequence[str], folder: Path) -> Outcome:
    """Return the result of a dry run of a program."""
    known = {file.path: file.document for file in files()}
    for word in words:
        if word in STAND_INS or word in known:
            path = folder / word
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_toml(nested(STAND_INS[word]) if word in STAND_INS else known[word]))
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = PROGRAMS[program]([*words, "--dry-run"])
        except SystemExit as ended:
            code = ended.code
        except ConfigError as error:
            code, _ = 78, print(error, file=said)
    lines = said.getvalue().splitlines()
    notices = [line for line in lines if line.startswith("note: ")]
    problems = [line for line in lines if line not in notices]
    return Outcome("refused", problems, len(notices)) if code else Outcome("starts", [], len(notices))


def _converted(file: str, words: Sequence[str]) -> Outcome:
    """Return the conversion of a file and overrides, with 1,000 rows if the number is unknown."""
    project = "areal" if file.endswith(".yaml") else "verl"
    overrides = [found for word in words if (found := read_override(word, "command line")) is not None]
    result = convert_settings([*corpus(project)[file], *overrides], Context(Path(file).stem, 1000), [file])
    if result.refused:
        return Outcome("refused", [f"{fate.setting.key}: {fate.note}" for fate in result.refused], len(result.notices))
    return Outcome("converted", result.missing, len(result.notices))
