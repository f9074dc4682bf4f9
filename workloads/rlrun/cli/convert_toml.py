"""Conversion of PRIME-RL's TOML into a manifest: the run of `rl @ a.toml b.toml`, with a comment for every key.

The files are read like `rl`, `sft` and `eval` read them, so the manifest describes the same run as the command. The result of each key is
derived from the origins of the resolved fields, and for keys without a field from notices and table rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import get_args

from rlrun.api.run_manifest import is_manifest
from rlrun.cli.run_layers import (
    EvalConfig,
    RlConfig,
    SftConfig,
    fake_data,
    file_layers,
    prime_rl_translator,
    read_layer,
    take_files,
)
from rlrun.config.dialects.rows import is_nothing
from rlrun.config.dialects.translate import DIALECT, Read
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.files import read_document
from rlrun.config.loading.layers import Layer, Origin
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.schema import Shape, as_written, child_shape, list_few, spell_name
from rlrun.config.loading.yaml_text import Document, Key
from rlrun.convert.compose.shared_parts import run_name
from rlrun.convert.conversion import Converted
from rlrun.convert.draft import Draft, Fate, Field
from rlrun.convert.manifest_writer import write_manifest
from rlrun.convert.readers.hydra import Setting
from rlrun.protocol.files.paths import Role

MODELS: Mapping[str, type[RlConfig]] = {"rl": RlConfig, "sft": SftConfig, "eval": EvalConfig}
"""Model of the run that each PRIME-RL command starts, in the order in which they are tried."""
_ROLES: tuple[Role, ...] = get_args(Role)
_Documents = Sequence[tuple[Role | None, Path, Document]]
_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
_TRAINER = "PRIME-RL"
_FOLDER = "the run's folder is <storage.mountPath>/<name>"
_CLIENT = "a manifest starts its own engines; to evaluate other servers: rlrun eval run.yaml --client.base-url URL"
_OF_RL = frozenset({"train", "algo", "env", "eval", "val", "advantage", "buffer"})
"""PRIME-RL's tables below `orchestrator` that `sft` and `eval` do not have."""
_OF_COMMANDS = ("name", "output_dir", "client")
"""Fields of a local run that the specification of a manifest does not have."""


def has_toml(words: Iterable[str]) -> bool:
    """Return whether a command line contains a TOML file."""
    return any(_is_toml(word) for word in words)


def _is_toml(word: str) -> bool:
    return not word.startswith("-") and "=" not in word and word.lower().endswith(".toml")


def convert_toml(words: Sequence[str]) -> Converted:
    """Convert a PRIME-RL command line, or only its files, into a manifest.

    Args:
        words: command line `[rl|sft|eval] [@] FILE... [--trainer @ FILE] [key=value] [--option value]`.

    Raises:
        ConfigError: every problem of every file. A single role's file is an error, because it does not describe a run.
    """
    command, arguments = _command_line(words)
    options, files = take_files(arguments)
    documents = [(role, path, _no_manifest(path, read_document(path))) for role, path in files]
    command = command or _detect_command(documents)
    if command not in MODELS:
        raise ConfigError([Problem(str(files[0][1]), "", _one_role(command, files[0][1]))])
    model = MODELS[command]
    layer = read_layer(arguments, {}, model).layer
    config = validate_layer(model, layer)
    if fake_data(layer) is not None:
        origin = next(layer.hints[name].origin for name in ("data_type", "data_fake") if name in layer.hints)
        measured = f"a run on fake data only measures speed and has no manifest; run `{command} @ {files[0][1]}`"
        raise ConfigError([Problem(origin.source, origin.path, measured, origin.line)])
    if config.task != "RL" and "task" not in layer.values:
        layer.values["task"] = config.task
    sources = [str(path) for _, path in files]
    return _Account(layer, model, sources, [*_of_files(documents, model), *_of_options(options)]).convert_keys()


def _command_line(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command if the line contains one, and its arguments with `@` before each file and overrides as options."""
    left = list(words)
    while left and left[0] in ("uv", "run"):
        left.pop(0)
    command = left.pop(0) if left and left[0] in (*MODELS, *_ROLES) else ""
    arguments: list[str] = []
    for word in left:
        if _is_toml(word) and arguments[-1:] != ["@"]:
            arguments.append("@")
        overrides = _OVERRIDE.match(word) is not None and not Path(word).exists()
        arguments.append(f"--{word}" if overrides else word)
    return command, arguments


def _no_manifest(path: Path, document: Document) -> Document:
    if is_manifest(document.value):
        raise ConfigError(
            [
                Problem(
                    str(path),
                    "",
                    "this file is a manifest already; convert only the other files, or run rl with all files",
                )
            ]
        )
    return document


def _detect_command(documents: _Documents) -> str:
    """Return the command of the files: the one whose model has the fewest unknown keys."""
    if any(role is not None for role, *_ in documents) or any(_is_of_rl(document) for *_, document in documents):
        return "rl"
    if len(documents) == 1 and _is_of_orchestrator(documents[0][2]):
        return "orchestrator"
    unknown: dict[str, int] = {}
    sources = False
    for command, model in MODELS.items():
        layers = [file_layers(path, None, document, model) for _, path, document in documents]
        unknown[command] = sum(len(layer.problems) for found in layers for layer in found)
        sources = sources or any("data" in layer.values for found in layers for layer in found)
        if command == "rl" and any(layer.values.get("environments") for found in layers for layer in found):
            return "rl" if unknown["rl"] == 0 else _fewest_unknown(unknown | _of_roles(documents))
    if sources and unknown["sft"] <= min(unknown.values()):
        return "sft"
    return _fewest_unknown(unknown | _of_roles(documents))


def _is_of_rl(document: Document) -> bool:
    """Return whether a file has a table that only `rl` has; other keys may be unknown."""
    orchestrator = document.value.get("orchestrator") if isinstance(document.value, dict) else None
    return isinstance(orchestrator, dict) and not _OF_RL.isdisjoint(orchestrator)


def _is_of_orchestrator(document: Document) -> bool:
    """Return whether a file is the orchestrator's own, which has the table `train` at its root."""
    train = document.value.get("train") if isinstance(document.value, dict) else None
    return isinstance(train, dict) and not {"env", "source", "sampling", "algo"}.isdisjoint(train)


def _of_roles(documents: _Documents) -> dict[str, int]:
    if len(documents) != 1:
        return {}
    _, path, document = documents[0]
    return {role: sum(len(layer.problems) for layer in file_layers(path, role, document)) for role in _ROLES}


def _fewest_unknown(unknown: Mapping[str, int]) -> str:
    return min(unknown, key=lambda command: unknown[command])


def _one_role(role: str, path: Path) -> str:
    others = " ".join(f"--{other} @ FILE" for other in _ROLES if other != role)
    return (
        f"the file of the {role} does not describe a whole run; add the other files: "
        f"`rlrun convert --{role} @ {path} {others}`, or start only this role: `{role} @ {path}`"
    )


def _of_files(documents: _Documents, model: type[RlConfig]) -> Iterator[tuple[str, Read]]:
    """Yield every key of every file with its source."""
    for role, path, document in documents:
        for read in prime_rl_translator(model, str(path), document.lines).read(document.value, role or "").reads:
            yield from ((str(path), one) for one in _leaf_keys(read))


def _of_options(words: Sequence[str]) -> Iterator[tuple[str, Read]]:
    """Yield every option with its value."""
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        several = [] if equals else list(takewhile(lambda word: not word.startswith("--"), left))
        del left[: len(several)]
        given: object = several if len(several) > 1 else several[0] if several else value or True
        yield COMMAND_LINE, Read(name.removeprefix("--"), name, given, None, None)


def _leaf_keys(read: Read) -> Iterator[Read]:
    """Yield the leaf keys of a table with RLRun's own names; yield other values unchanged."""
    ours = read.row is None or read.row.fate == "same"
    if ours and isinstance(read.value, dict) and read.value:
        for name, value in read.value.items():
            yield from _leaf_keys(replace(read, path=f"{read.path}.{name}", shown=f"{read.shown}.{name}", value=value))
    elif ours and isinstance(read.value, list) and any(isinstance(one, dict) for one in read.value):
        for i, value in enumerate(read.value):
            yield from _leaf_keys(replace(read, path=f"{read.path}[]", shown=f"{read.shown}[{i}]", value=value))
    else:
        yield read


@dataclass(frozen=True)
class _Account:
    """A resolved run and all keys that were read for it."""

    layer: Layer
    model: type[RlConfig]
    sources: Sequence[str]
    reads: Sequence[tuple[str, Read]]

    def convert_keys(self) -> Converted:
        """Return the manifest and the result of every key."""
        fates = [self._key_fate(source, read) for source, read in self.reads]
        settings = {
            f"{fate.setting.source} {read.shown}": fate.setting
            for fate, (_, read) in zip(fates, self.reads, strict=True)
        }
        draft = Draft(_TRAINER, settings, (), {})
        values = {name: value for name, value in self.layer.values.items() if name not in _OF_COMMANDS}
        for path, value, key in self._given_fields(values, Shape("model", model=self.model), (), ""):
            draft.fields[path] = self._field_with_causes(value, key)
        given = self.layer.values.get("name")
        causes = self._causing_keys(("name",)) if given is not None else ()
        name = Field(run_name(given, Path(self.sources[0]).stem), causes)
        notices = [str(notice) for notice in self.layer.notices if not notice.message.startswith("ignored: ")]
        return Converted(
            write_manifest(draft, name, fates, self.sources), _TRAINER, fates, [], [], [*notices, *self._on_cpus()]
        )

    def _on_cpus(self) -> Iterator[str]:
        """Yield a notice for a run in PRIME-RL's names without GPUs, because PRIME-RL uses GPUs by default."""
        trainer = self.layer.values.get("trainer")
        if DIALECT in self.layer.hints and not (isinstance(trainer, dict) and trainer.get("gpus_per_replica")):
            yield "the files set no GPUs, so the run uses CPUs; set trainer.gpusPerReplica and inference.gpusPerReplica"

    def _given_fields(self, value: object, shape: Shape, key: Key, path: str) -> Iterator[tuple[str, object, Key]]:
        """Yield every field that is set: its path in a manifest, its value and its key."""
        if shape.model is None or not isinstance(value, dict) or not value:
            yield path, as_written(value, shape), key
            return
        for name, inner in value.items():
            own = spell_name(shape.model, name, "camel")
            yield from self._given_fields(
                inner, child_shape(shape, name), (*key, name), f"{path}.{own}" if path else own
            )

    def _field_with_causes(self, value: object, key: Key) -> Field:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = tuple(self._causing_keys((*key, i)) for i in range(len(value)))
            return Field(value, (), self._derivation_note(key) if not any(items) else "", items)
        causes = self._causing_keys(key)
        return Field(value, causes, "" if causes else self._derivation_note(key))

    def _field_origins(self, key: Key) -> list[Origin]:
        """Return the origins of a field and its children, or of the nearest parent with an origin."""
        found = [origin for one, origin in self.layer.origins.items() if one[: len(key)] == key]
        return found or [self.layer.origin(key)]

    def _causing_keys(self, key: Key) -> tuple[str, ...]:
        """Return the keys that set a field, in the notation of `draft.settings`."""
        path = _dotted_path(key)
        origins = {(origin.source, origin.path) for origin in self._field_origins(key)}
        return tuple(
            dict.fromkeys(
                f"{source} {read.shown}"
                for source, read in self.reads
                if (source, read.shown) in origins and _may_set_field(read, path)
            )
        )

    def _derivation_note(self, key: Key) -> str:
        """Return a note about the keys from which a field is derived, if no key sets it directly."""
        origins = list(dict.fromkeys(origin.path for origin in self._field_origins(key) if origin.path))
        return f"follows from {list_few(origins)}" if origins else ""

    def _key_fate(self, source: str, read: Read) -> Fate:
        label = read.shown if len(self.sources) == 1 or source == COMMAND_LINE else f"{source}: {read.shown}"
        setting = Setting(label, read.value, source, read.line)
        to = tuple(dict.fromkeys(self._decided_fields(source, read)))
        notes = [one.message for one in self.layer.notices if (one.source, one.path) == (source, read.shown)]
        if to == ("output_dir",):
            return Fate(setting, "dropped", (), _FOLDER)
        if to and all(one.partition(".")[0] == "client" for one in to):
            return Fate(setting, "dropped", (), _CLIENT)
        if to:
            kept = read.row is None or (read.row.fate == "same" and read.row.convert is None)
            return Fate(setting, "taken" if kept else "mapped", to, "; ".join(notes))
        if notes:
            return Fate(setting, "dropped", (), "; ".join(note.removeprefix("ignored: ") for note in notes))
        if (other := self._overriding_key(source, read)) is not None:
            return Fate(setting, "dropped", (), f"{other} overrides it")
        if is_nothing(read.value):
            return Fate(setting, "default", (), "not set, which is the default")
        return Fate(setting, "dropped", (), (read.row.text if read.row is not None else "") or "the default here")

    def _decided_fields(self, source: str, read: Read) -> Iterator[str]:
        """Yield the fields whose value comes from a key."""
        for key, origin in self.layer.origins.items():
            if key and origin.source == source and origin.path == read.shown:
                yield _dotted_path(key)

    def _overriding_key(self, source: str, read: Read) -> str | None:
        """Return the key that sets the same field in a later file or on the command line."""
        own = next(i for i, one in enumerate(self.reads) if one == (source, read))
        for other, one in self.reads[own + 1 :]:
            if one.path.replace("-", "_") == read.path or (
                read.row is not None
                and one.row is not None
                and read.row.targets
                and read.row.targets == one.row.targets
            ):
                return f"{one.shown} of {other}"
        return None


def _may_set_field(read: Read, path: str) -> bool:
    """Return whether a key may set the field at `path`, according to the key's table row."""
    if read.row is None or not read.row.targets:
        return True
    return any(path.startswith(target) or target.startswith(path) for target in read.row.targets)


def _dotted_path(key: Key) -> str:
    """Return the path of a field in the notation of the table rows: `[]` for each item of a list."""
    path = ""
    for part in key:
        path += "[]" if isinstance(part, int) else f".{part}" if path else part
    return path
