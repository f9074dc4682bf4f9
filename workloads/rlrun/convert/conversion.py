"""Conversion of files and overrides into a manifest: detection of the trainer, settings, draft, text."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rlrun.convert.compose import areal_run, sft_run, verl_run
from rlrun.convert.compose.shared_parts import Context, name_run
from rlrun.convert.draft import Draft, Fate
from rlrun.convert.manifest_writer import write_manifest
from rlrun.convert.readers.hydra import (
    Setting,
    is_listed,
    is_programs_own,
    latest_settings,
    listed_files,
    named_configuration,
    read_override,
    read_scalar,
    read_yaml,
    refuse_file,
    resolve_references,
    without_deleted,
)
from rlrun.convert.readers.shell_scripts import Command, Word, read_script
from rlrun.convert.tables import areal_keys as areal_table
from rlrun.convert.tables import sft_keys as areal_sft_table
from rlrun.convert.tables import sft_keys as verl_sft_table
from rlrun.convert.tables import verl_keys as verl_table
from rlrun.convert.tables.other_trainers import other_trainers, trainer_of_command, trainer_of_keys
from rlrun.convert.tables.row import Row
from rlrun.convert.tables.verl_data_keys import CONFIGURATIONS, program_name, unknown_program

LATER = "<later command>"
"""Key of a setting for a command after the first one, which is not read."""
PROGRAM = "<program>"
"""Key of a setting for the program that a command starts."""
ARGUMENTS = "command line"
"""Source of overrides on the command line."""


@dataclass(frozen=True)
class Dialect:
    """Configuration format of another trainer."""

    name: str
    rows: Sequence[Row]
    aliases: Mapping[str, str]
    defaults: Mapping[str, object]
    compose: Callable[[Draft, Context], None]
    named_by: str
    """Key of the run's name."""
    indifferent: tuple[str, ...]
    """Prefixes of keys that never change the training result; an unknown key with another prefix is refused."""
    marks: tuple[str, ...]
    """Prefixes of keys, or `key=value`, that no other format has; the first format with a match is used."""
    defaults_of: Callable[[Collection[str], str], Mapping[str, object]] | None = None
    """Function from the written keys and the program to the defaults, if programs of this trainer have different defaults."""


VERL = Dialect(
    "verl",
    verl_table.ROWS,
    verl_table.ALIASES,
    verl_table.DEFAULTS,
    verl_run.compose_verl,
    "trainer.experiment_name",
    verl_table.INDIFFERENT,
    ("actor_rollout_ref.", "algorithm.adv_estimator"),
)
AREAL = Dialect(
    "AReaL",
    areal_table.ROWS,
    areal_table.ALIASES,
    areal_table.DEFAULTS,
    areal_run.compose_areal,
    "experiment_name",
    areal_table.INDIFFERENT,
    ("allocation_mode", "gconfig.", "train_dataset.", "actor.", "rollout.backend", "trial_name"),
)
VERL_SFT = Dialect(
    "verl (supervised)",
    verl_sft_table.VERL_SFT_ROWS,
    verl_sft_table.VERL_SFT_ALIASES,
    verl_sft_table.VERL_SFT_DEFAULTS,
    sft_run.compose_verl,
    "trainer.experiment_name",
    verl_sft_table.INDIFFERENT,
    ("data.train_files",),
    verl_sft_table.defaults_of,
)
AREAL_SFT = Dialect(
    "AReaL (supervised)",
    areal_sft_table.AREAL_SFT_ROWS,
    areal_sft_table.AREAL_SFT_ALIASES,
    areal_sft_table.AREAL_SFT_DEFAULTS,
    sft_run.compose_areal,
    "experiment_name",
    areal_table.INDIFFERENT,
    ("train_dataset.type=sft",),
)
DIALECTS = (VERL, AREAL_SFT, AREAL, VERL_SFT)


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    text: str
    """Manifest as YAML."""
    dialect: str
    fates: Sequence[Fate]
    """Result of each key, in their order."""
    missing: Sequence[str]
    """Values that the user must add before the run can start."""
    refused: Sequence[Fate]
    """Keys that RLRun does not support; the manifest must then not be used."""
    notices: Sequence[str]


def read_settings(text: str, source: str, environment: Mapping[str, str]) -> list[Setting]:
    """Read the settings of one file.

    Args:
        text: content of the file.
        source: name of the file; its suffix decides the format.
        environment: environment variables for shell scripts.

    Raises:
        ConfigError: the file cannot be read, or contains no settings.
    """
    suffix = PurePath(source).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return read_yaml(text, source)
    commands = read_script(text, source, environment)
    for command in commands:
        if (other := trainer_of_command(command.texts)) is not None:
            raise other.unsupported_error(source, command.words[0].line if command.words else None)
    starting = [command for command in commands if command.has_settings]
    if not starting:
        _refuse_wrapper(source, commands)
        raise refuse_file(
            source,
            "the file contains no command with key=value arguments, such as python3 -m verl.trainer.main_ppo data.train_files=...",
        )
    first, *others = starting
    _refuse_choice(source, first, others)
    _refuse_program(source, first)
    settings = [*_argument_settings(first.options, source), *_argument_settings(first.words, source)]
    line = first.words[0].line if first.words else None
    return [
        *settings,
        Setting(PROGRAM, program_name(first.module, first.texts), source, line),
        *(Setting(LATER, other.module, source, other.words[0].line) for other in others),
    ]


def _refuse_wrapper(source: str, commands: Sequence[Command]) -> None:
    """Refuse a script that only starts another script; the message contains its name."""
    for command in commands:
        if (other := next((text for text in command.texts if text.endswith(".sh")), None)) is not None:
            raise refuse_file(
                source, f"the script only starts another script; run rlrun convert {other}", command.words[0].line
            )


def _refuse_program(source: str, first: Command) -> None:
    """Refuse an unknown program of verl, because its own Python code can change the loss or the batches."""
    if (name := unknown_program(first.module, first.texts)) is not None:
        raise refuse_file(
            source,
            f"{name} is an unknown program of verl, which can change the training; if it trains like "
            "verl.trainer.main_ppo, write that name instead",
            first.words[0].line,
        )


def _refuse_choice(source: str, first: Command, others: Sequence[Command]) -> None:
    """Refuse a script in which a condition with an unknown value selects one of several runs."""
    texts = [word.text for word in first.words]
    for other in () if first.is_certain else others:
        if [word.text for word in other.words] != texts:
            lines = f"line {first.words[0].line} and line {other.words[0].line} start different runs"
            raise refuse_file(
                source,
                f"{lines}, and an unknown condition selects one; keep only one of them in the file",
                other.words[0].line,
            )


def _argument_settings(words: Sequence[Word], source: str) -> list[Setting]:
    """Return the settings of a command's words, including options `--name value`; other words become keys without a value."""
    settings: list[Setting] = []
    for word in words:
        if not word.text and not word.unset:  # "${@:2}" of a script without arguments
            continue
        name, equals, value = word.text.partition("=")
        if word.text.startswith("-"):
            settings.append(Setting(name, read_scalar(value) if equals else None, source, word.line, word.unset))
        elif (found := read_override(word.text, source, word.line, word.unset)) is not None:
            settings.append(found)
        elif settings and settings[-1].key.startswith("-") and settings[-1].value is None:
            settings[-1] = Setting(settings[-1].key, word.text, source, word.line)
        else:
            settings.append(Setting(word.text, None, source, word.line))
    return settings


def convert_settings(settings: Iterable[Setting], context: Context, sources: Sequence[str]) -> Converted:
    """Return the manifest of settings; a later setting overrides an earlier one with the same key.

    Raises:
        ConfigError: the settings do not belong to a known trainer.
    """
    kept, deletions = without_deleted(settings)
    later = [
        f"{one.source}:{one.line}: the command {one.value} is ignored: only the first command is converted"
        for one in kept
        if one.key == LATER
    ]
    program = next((str(one.value) for one in kept if one.key == PROGRAM), "")
    found = resolve_references(latest_settings(one for one in kept if one.key not in (LATER, PROGRAM)).values())
    dialect = dialect_of(found, sources)
    written = [one.key for one in found]
    defaults = dialect.defaults if dialect.defaults_of is None else dialect.defaults_of(written, program)
    canonical = {canonical_key(setting.key, dialect.aliases): setting for setting in found}
    shadowed = [setting for setting in found if canonical[canonical_key(setting.key, dialect.aliases)] is not setting]
    draft = Draft(dialect.name.partition(" (")[0], canonical, dialect.rows, defaults)
    draft.take_rows()
    draft.refuse_unknown(dialect.indifferent)
    dialect.compose(draft, context)
    _require_configuration(draft, sources)
    draft.require_known((dialect.named_by, "trainer.project_name", "trainer.logger"))
    name = name_run(draft, dialect.named_by, context)
    if name.causes:
        draft.fields["metadata.name"] = name
    fates = draft.fates()
    fates += [Fate(setting, "dropped", (), "another spelling of this key is also set") for setting in shadowed]
    fates += [
        Fate(one, "dropped", (), f"deletes {count} previous keys" if count else f"deletes a default of {dialect.name}")
        for one, count in deletions
    ]
    draft.fields.pop("metadata.name", None)
    refused = [fate for fate in fates if fate.kind == "refused"]
    return Converted(
        write_manifest(draft, name, fates, sources),
        dialect.name,
        fates,
        list(dict.fromkeys(draft.missing)),
        refused,
        [*later, *draft.notices, *draft.list_warnings()],
    )


def _require_configuration(draft: Draft, sources: Sequence[str]) -> None:
    """Report Hydra files in a command or in a list of defaults that are not among the sources."""
    given = {PurePath(source).stem for source in sources}
    named = named_configuration(list(draft.settings.values()))
    if named is not None and named[1] not in given and not (named[1] in CONFIGURATIONS and is_programs_own(named[0])):
        draft.missing.append(_not_read("--config-name", named[1], sources))
    for key, setting in draft.settings.items():
        if is_listed(key):
            names = [name.partition("@")[0] for name in listed_files([setting]) if name not in ("_self_", "None")]
            unread = [name for name in names if name not in CONFIGURATIONS and PurePath(name).stem not in given]
            draft.missing += [_not_read("defaults", name, sources) for name in unread]


def _not_read(key: str, name: str, sources: Sequence[str]) -> str:
    return (
        f"{key}={name}: this file was not read; name it before the script: "
        f"rlrun convert {name or 'FILE'}.yaml {' '.join(sources)}"
    )


def dialect_of(settings: Sequence[Setting], sources: Sequence[str]) -> Dialect:
    """Return the trainer whose keys these are. Raises ConfigError if none matches."""
    if (other := trainer_of_keys(setting.key for setting in settings)) is not None:
        raise other.unsupported_error(", ".join(sources))
    for dialect in DIALECTS:
        if any(f"{setting.key}={setting.value}".startswith(dialect.marks) for setting in settings):
            return dialect
    if {"apiVersion", "kind"} <= {setting.key for setting in settings}:
        file = shlex.quote(sources[0])
        raise refuse_file(
            ", ".join(sources),
            f"the file is a Kubernetes object, not a file of verl or AReaL; an RLRun needs no conversion: rlrun validate {file}, "
            f"rlrun local {file}",
        )
    raise refuse_file(
        ", ".join(sources),
        "the file has no key of verl (actor_rollout_ref...) or AReaL (allocation_mode, actor...); supported trainers: "
        + ", ".join(dialect.name for dialect in DIALECTS)
        + "; recognized, but not supported: "
        + ", ".join(one.name for one in other_trainers()),
    )


def canonical_key(key: str, aliases: Mapping[str, str]) -> str:
    """Return the canonical name of a key from another release."""
    for _ in range(3):
        start = next(
            (start for start in aliases if key == start or (start.endswith(".") and key.startswith(start))), None
        )
        if start is None:
            return key
        key = aliases[start] + key.removeprefix(start)
    return key
