"""`rlrun convert FILE... [key=value ...] [-o run.yaml]`: convert configuration files of PRIME-RL, verl and AReaL into an RLRun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rlrun.cli.command_options import report_problems
from rlrun.cli.convert_toml import convert_toml, has_toml
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Options, Parser
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.models.data import DataSetConfig
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import ARGUMENTS, Converted, convert_settings, read_settings
from rlrun.convert.manifest_writer import summarize_keys
from rlrun.convert.readers.hydra import (
    Setting,
    default_file,
    listed_files,
    named_configuration,
    possible_files,
    read_override,
    without_lists,
)
from rlrun.environments.dataset_rows import Rows
from rlrun.local.judge import judge_manifest
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

ParserT = TypeVar("ParserT", bound=Options)
_HELP = frozenset({"-h", "--help"})
_CODES = (
    f"Exit codes: {exit_codes.OK} the manifest is complete, {exit_codes.DATA} the manifest is written but incomplete (one line per gap), "
    f"{exit_codes.CONFIGURATION} RLRun does not support the run, {exit_codes.USAGE} the command line is wrong."
)

_DEPTH = 8
"""Maximum depth of nested lists of defaults (files that include files)."""
_SUFFIXES = (".yaml", ".yml", ".sh", ".bash", ".toml", ".txt", "")
"""Suffixes of files with settings."""


def convert_parser() -> Parser:
    """Return the parser of `rlrun convert`."""
    p = _parser_with_options(
        Parser, f"Convert configuration files of PRIME-RL, verl or AReaL into an RLRun manifest. {_CODES}"
    )
    p.add_argument(
        "files",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="TOML, YAML or a shell script; a later file replaces keys of an earlier file; with TOML also PRIME-RL's command line, "
        "`rl @ a.toml --trainer @ t.toml --max-steps 5`",
    )
    return p


def _parser_with_options(kind: type[ParserT], description: str | None = None) -> ParserT:
    p = kind(prog="rlrun convert", description=description)
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="file for the manifest (default: print it)")
    p.add_argument(
        "--rows", type=int, metavar="N", help="number of rows of the training data, to convert epochs into steps"
    )
    p.add_argument("--force", action="store_true", help="replace an existing output file")
    return p


def run(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    toml = has_toml(argv)
    options, words = (
        _parser_with_options(Options).parse_known_args(list(argv))
        if toml and not _HELP & {*argv}
        else _parse_arguments(argv)
    )
    if options.rows is not None and options.rows < 1:
        print(f"rlrun convert: --rows: got {options.rows}, expected a whole number from 1", file=sys.stderr)
        return exit_codes.USAGE
    if options.rows is not None and toml:
        print(
            "rlrun convert: --rows: PRIME-RL's files contain the number of steps (max_steps); remove --rows",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    if options.output is not None and options.output.exists() and (not options.force or _is_swapped(words)):
        fix = (
            f"there is no file {words[0]}; to convert {options.output}, write rlrun convert {options.output} -o {words[0]}"
            if _is_swapped(words)
            else f"{options.output} exists already; choose another -o, or add --force"
        )
        print(f"rlrun convert: {fix}", file=sys.stderr)
        return exit_codes.USAGE
    if options.output is not None and not options.output.absolute().parent.is_dir():
        print(
            f"rlrun convert: -o {options.output}: there is no folder {options.output.parent}; create it first",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    try:
        converted = convert_toml(words) if toml else _convert_sources(words, options.rows)
    except ConfigError as error:
        return report_problems(error)
    return _report_and_write(converted, options.output)


def _is_swapped(words: Sequence[str]) -> bool:
    """Return whether the only source does not exist, so that a source and an existing output were probably swapped."""
    return len(words) == 1 and Path(words[0]).suffix.lower() in _SUFFIXES and not Path(words[0]).exists()


def _parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    options = convert_parser().parse_args(list(argv))
    return options, options.files


def _convert_sources(words: Sequence[str], rows: int | None) -> Converted:
    settings, sources = read_sources(words)
    context = Context(Path(sources[0]).stem if sources else "run", rows, _count_rows)
    return convert_settings(settings, context, sources or [ARGUMENTS])


def read_sources(words: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Return the settings of all files and overrides in their order, and the file names. Raises ConfigError for an unreadable file."""
    settings: list[Setting] = []
    sources: list[str] = []
    for word in words:
        found = None if Path(word).exists() else read_override(word, ARGUMENTS)
        if found is not None:
            settings.append(found)
        elif word.startswith("-"):
            raise ConfigError([Problem(ARGUMENTS, "", f"unknown option {word}; see rlrun convert --help")])
        elif not Path(word).exists() and ("=" in word or Path(word).suffix.lower() not in _SUFFIXES):
            raise ConfigError(
                [Problem(ARGUMENTS, word, "there is no such file; write a key as KEY=VALUE, or as ~KEY to delete it")]
            )
        else:
            own = read_settings(read_text(Path(word)), word, dict(os.environ))
            named = _named_file(own, Path(word), sources)
            if named is not None:
                settings += _with_defaults(read_settings(read_text(named), str(named), {}), named, sources)
            settings += _with_defaults(own, Path(word), sources)
    return settings, sources


def _with_defaults(own: Sequence[Setting], file: Path, sources: list[str], depth: int = 0) -> list[Setting]:
    """Return the settings of a file and of the files in its lists of defaults; add the file names to `sources`."""
    entries = listed_files(own) if file.suffix in (".yaml", ".yml") else []
    at = entries.index("_self_") if "_self_" in entries else len(entries)
    parts: list[list[Setting]] = []
    unread: list[str] = []
    for entry in [*entries[:at], None, *entries[at + 1 :]]:
        path = None if entry is None else default_file(entry, file.parent)
        if entry is None:
            parts.append(list(own))
            sources.append(str(file))
        elif path is not None and path.is_file() and depth < _DEPTH:
            parts.append(_with_defaults(read_settings(read_text(path), str(path), {}), path, sources, depth + 1))
        else:
            unread.append(entry)
    own_at = next(index for index, part in enumerate(parts) if part == list(own))
    parts[own_at] = without_lists(own, unread) if entries else list(own)
    return [setting for part in parts for setting in part]


def _named_file(settings: Sequence[Setting], script: Path, sources: Sequence[str]) -> Path | None:
    """Return the file of `--config-name` if it exists here and is not on the command line, otherwise None."""
    named = named_configuration(settings)
    if named is None or named[1] in {Path(source).stem for source in sources}:
        return None
    return next((path for path in possible_files(*named, script.absolute()) if path.is_file()), None)


def _count_rows(path: str) -> int | None:
    """Return the number of rows of a local file, or None if the file does not exist or contains no data."""
    if not Path(path).is_file():
        return None
    try:
        return len(Rows(DataSetConfig(path=str(Path(path).absolute())), "data"))
    except (RoleError, ValueError, OSError):
        return None


def _report_and_write(converted: Converted, output: Path | None) -> int:
    where = str(output) if output is not None else "manifest"
    for notice in converted.notices:
        print(f"note: {notice}", file=sys.stderr)
    if converted.refused:
        for fate in converted.refused:
            told = f"got {str(fate.setting.shown)[:80]!r}: {fate.note}"
            print(Problem(fate.setting.source, fate.setting.key, told, fate.setting.line), file=sys.stderr)
        return exit_codes.CONFIGURATION
    judged = judge_manifest(converted.text, where, here=False)
    if output is None:
        print(converted.text, end="")
    else:
        try:
            output.write_text(converted.text, encoding="utf-8")
        except OSError as error:
            print(f"rlrun convert: -o {output}: cannot be written: {error.strerror}", file=sys.stderr)
            return exit_codes.USAGE
        print(f"{output}: {converted.dialect}, {summarize_keys(converted.fates)}", file=sys.stderr)
    for line in converted.missing:
        print(f"{where}: missing: {line}", file=sys.stderr)
    for problem in judged.problems:
        print(problem, file=sys.stderr)
    return exit_codes.DATA if converted.missing or judged.problems else exit_codes.OK
