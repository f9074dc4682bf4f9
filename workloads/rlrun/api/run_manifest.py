"""Manifest of an `RLRun`: options and variables that override it, and its reader.

Example: `rlrun local run.yaml --max-steps 20 --trainer.optimizer.lr 1e-5`. Precedence: command line > manifest > environment > defaults.

The reader applies the API server's rules and reports each problem with its line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlrun.api.resource import API_VERSION, KIND, ObjectMeta, RLRun, RLRunSpec
from rlrun.config.dialects.completion import complete_layer
from rlrun.config.dialects.prime_rl import PRIME_RL
from rlrun.config.dialects.rows import Dialect
from rlrun.config.dialects.translate import Translator
from rlrun.config.loading.arguments import Arguments, parse_arguments, parse_environment, value_words
from rlrun.config.loading.examine import Examined, examine_layer
from rlrun.config.loading.files import FORMATS, read_text
from rlrun.config.loading.layers import Layer, Reader, assign_values, merge_layers
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT, ConfigError, Problem
from rlrun.config.loading.schema import find_field, snake_name, spell_name
from rlrun.config.loading.yaml_text import Document, Key, examine_yaml
from rlrun.config.suggest import plain_name
from rlrun.runtime.json_types import Json

_ALIASES = {"ckpt": "checkpoint"}
_SPEC = ("spec",)
_OF_COMMANDS = frozenset({"--dry-run", "--resume", "--output-dir"})
"""PRIME-RL options that are fields there but options of commands here: a command supports or refuses them itself."""


def take_variation(
    argv: Sequence[str], own: Collection[str] = (), model: type[RLRunSpec] = RLRunSpec, dialect: Dialect = PRIME_RL
) -> tuple[list[str], list[str]]:
    """Extract the options that are fields of a specification, with their values, from a command line.

    A list takes all words after its option up to the next option or file. A flag takes only `true` and `false`. Any other option takes one
    word. A further word that is not a file stays with its option, which then refuses it.

    Args:
        argv: command line without the program's name.
        own: options of the command itself, which stay in the command line.
        model: model of the specification, possibly extended.
        dialect: another project's option names, which are extracted too.
    """
    others = _dialect_translator(COMMAND_LINE, model, dialect)
    rest: list[str] = []
    taken: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in own or not _is_field(word, others):
            rest.append(word)
            continue
        count = value_words(model, word, words, aliases=_ALIASES, others=others)
        while len(words) > count and _is_stray(words[count]):
            count += 1
        taken += [word, *words[:count]]
        del words[:count]
    return rest, taken


def _is_stray(word: str) -> bool:
    return not word.startswith(("-", "@")) and Path(word).suffix not in FORMATS and not os.path.lexists(word)


def _is_field(word: str, others: Translator) -> bool:
    """Return whether an option starts with a field's name, or with another project's name of a field."""
    option = word.partition("=")[0]
    name = option.removeprefix("--")
    if not word.startswith("--") or not name or option in _OF_COMMANDS:
        return False
    first = snake_name(name.partition(".")[0])
    positive = first.removeprefix("no_")
    known = find_field(others.model, _ALIASES.get(positive, positive)) is not None
    return known or others.knows(name.split("."))


def field_options() -> list[str]:
    """Return the options of the top-level fields of a specification."""
    return [f"--{spell_name(RLRunSpec, name, 'kebab')}" for name in RLRunSpec.model_fields]


def _dialect_translator(source: str, model: type[RLRunSpec] = RLRunSpec, dialect: Dialect = PRIME_RL) -> Translator:
    return Translator(dialect, model, source, aliases=_ALIASES, fallback="trainer")


@dataclass(frozen=True)
class Variation:
    """Changes of a manifest by a command line and an environment."""

    options: Sequence[str] = ()
    """Options with their values, in order."""
    env: Mapping[str, str] = field(default_factory=dict)

    def merged_over(self, manifest: Layer) -> Layer:
        """Return the manifest's layer with the options applied over it and the environment variables below it."""
        given = parse_arguments(RLRunSpec, self.options, aliases=_ALIASES, others=_dialect_translator(COMMAND_LINE))
        variables = parse_environment(RLRunSpec, self.env, others=_dialect_translator(ENVIRONMENT))
        below = Layer()
        _apply_variation(below, variables)
        if not isinstance(manifest.values.get("spec", {}), dict):
            return manifest
        merged = merge_layers([below, manifest])
        _apply_variation(merged, given)
        complete_layer(merged, _SPEC)
        return merged


def _apply_variation(layer: Layer, arguments: Arguments) -> None:
    assign_values(layer, RLRun, [replace(item, key=(*_SPEC, *item.key)) for item in arguments.assignments])
    layer.origins.update({(*_SPEC, *key): origin for key, origin in arguments.layer.origins.items()})
    layer.problems += arguments.layer.problems
    layer.notices += arguments.layer.notices
    layer.hints |= arguments.layer.hints


_TOML = (
    "is TOML, but a manifest is YAML: `rlrun convert {0} -o run.yaml` converts PRIME-RL's file; `rl @ {0}` (or sft, eval) "
    "starts it unchanged, and --dry-run shows the resulting run"
)
_TOP = ("apiVersion", "kind", "metadata", "spec", "status")
GROUP = API_VERSION.partition("/")[0]
ApplyDefaults = Callable[[Json], Json]
"""Function from a manifest to the same manifest with its namespace's defaults (`rlrun.defaults.given_defaults.GivenDefaults`)."""


def read_manifest(path: Path, variation: Variation | None = None, defaults: ApplyDefaults | None = None) -> RLRun:
    """Read the RLRun of a YAML or JSON file. Documents of other kinds are ignored.

    Args:
        path: manifest file.
        variation: options and environment variables that change the manifest.
        defaults: function that applies the namespace's defaults.

    Raises:
        ConfigError: All problems, each with its line.
    """
    return parse_manifest(read_text(path), str(path), variation, defaults)[0]


def parse_manifest(
    text: str, source: str, variation: Variation | None = None, defaults: ApplyDefaults | None = None
) -> tuple[RLRun, Layer]:
    """Parse a manifest as `read_manifest` does, and return the origin of every field; messages call the text `source`."""
    examined, layer = examine_manifest(text, source, variation, defaults)
    if examined.problems or examined.result is None:
        raise ConfigError(examined.problems)
    return examined.result, layer


def examine_manifest(
    text: str, source: str, variation: Variation | None = None, defaults: ApplyDefaults | None = None
) -> tuple[Examined[RLRun], Layer]:
    """Parse a manifest as `parse_manifest` does, but return the problems together with the valid part.

    Raises:
        ConfigError: The text is not YAML, or does not contain exactly one RLRun.
    """
    if source.lower().endswith(".toml"):
        raise ConfigError([Problem(source, "", _TOML.format(shlex.quote(source)))])
    documents, broken = examine_yaml(text, source)
    try:
        document = run = the_run(documents, source)
    except ConfigError as error:
        raise ConfigError([*broken, *error.problems]) from None
    wrong_type = _check_type(document, source)
    if wrong_type and not is_manifest(document.value):  # problems of another kind's fields would only confuse
        raise ConfigError([*broken, *wrong_type])
    document, misplaced = put_in_place(document, source)
    value = document.value | {"apiVersion": API_VERSION, "kind": KIND}
    value = value if defaults is None else defaults(value)
    layer = Reader(RLRun, source, document.lines, camel_only=True).read(value, line=document.line)
    layer.problems += [*broken, *wrong_type, *misplaced]
    layer.notices += [_ignored_document(other, source) for other in documents if other.value is not run.value]
    if variation is not None:
        layer = variation.merged_over(layer)
    return examine_layer(RLRun, layer), layer


def manifest_text(spec: RLRunSpec, name: str) -> str:
    """Return a manifest with the fields that a user has set, as YAML. It omits the pods' variables, whose values may be secrets.

    Args:
        spec: specification of the run.
        name: name of the run.
    """
    import yaml

    pods = {role: {"env", "env_from"} for role in ("trainer", "inference", "orchestrator")}
    written = spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=pods)
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": written}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def the_run(documents: list[Document], source: str) -> Document:
    """Return the only RLRun among documents.

    Raises:
        ConfigError: There is not exactly one RLRun.
    """
    mappings = [document for document in documents if isinstance(document.value, dict)]
    runs = [document for document in mappings if is_manifest(document.value)]
    if len(runs) == 1:
        return runs[0]
    if len(runs) > 1:
        lines = ", ".join(str(document.line) for document in runs)
        raise ConfigError(
            [Problem(source, "", f"contains {len(runs)} RLRuns (lines {lines}), expected exactly one; split the file")]
        )
    if len(documents) == 1 and mappings:
        return mappings[0]
    if (
        len(documents) == 1
        and isinstance(documents[0].value, list)
        and documents[0].value[:1] != []
        and isinstance(documents[0].value[0], dict)
    ):
        line = documents[0].line
        message = f"contains a list, expected exactly one {KIND}; write the fields without the dash, and --- between several manifests"
        raise ConfigError([Problem(source, "", message, line)])
    kinds = [str(document.value.get("kind")) for document in mappings]
    found = f"{len(documents)} documents ({', '.join(kinds)})" if kinds else "no mapping"
    raise ConfigError(
        [Problem(source, "", f"contains {found if documents else 'nothing'}, expected exactly one {KIND}")]
    )


def _ignored_document(document: Document, source: str) -> Problem:
    """Return a note about another document of the file, such as a Secret of the run."""
    kind = document.value.get("kind") if isinstance(document.value, dict) else None
    what = kind if isinstance(kind, str) and plain_name(kind) else "a document without kind"
    return Problem(source, "", f"{what} is not an {KIND}; it is ignored", document.line)


def is_manifest(document: Json) -> bool:
    """Return whether a document's kind or apiVersion is that of an RLRun."""
    kind, version = document.get("kind"), document.get("apiVersion")
    is_kind = isinstance(kind, str) and kind.lower() in (KIND.lower(), KIND.lower() + "s")
    return is_kind or (isinstance(version, str) and version.partition("/")[0] == GROUP)


def _check_type(document: Document, source: str) -> list[Problem]:
    """Return the problems of apiVersion and kind."""
    wanted = {"apiVersion": API_VERSION, "kind": KIND}
    wrong = {name: document.value.get(name) for name, right in wanted.items() if document.value.get(name) != right}
    if len(wrong) == len(wanted) and not is_manifest(document.value):
        return [_other_object(document, source)]
    problems = []
    for name, got in wrong.items():
        if name in document.value:
            line = document.lines.get((name,), document.line)
            message = f"got {str(got)[:80]!r}, expected {wanted[name]}; write {name}: {wanted[name]}"
            problems.append(Problem(source, name, message, line))
        elif not any(plain_name(str(key)) == plain_name(name) for key in document.value):
            message = f"required, but not set; write {name}: {wanted[name]}"
            problems.append(Problem(source, name, message, document.line))
    return problems


def _other_object(document: Document, source: str) -> Problem:
    """Return the problem of a document that is another Kubernetes object, or has neither apiVersion nor kind."""
    kind, version = document.value.get("kind"), document.value.get("apiVersion")
    if kind is None and version is None:
        names = ", ".join(str(name) for name in list(document.value)[:3])
        message = (
            f"required, but not set: the file has {names}; write apiVersion: {API_VERSION} and kind: {KIND} for a run"
        )
        return Problem(source, "apiVersion", message, document.line)
    line = document.lines.get(("kind",), document.line)
    return Problem(
        source, "kind", f"got {str(kind)[:80]!r} of {str(version)[:80]!r}, expected {KIND} of {API_VERSION}", line
    )


def put_in_place(document: Document, source: str) -> tuple[Document, list[Problem]]:
    """Move misplaced parts of a manifest to the right place, and report a problem for each.

    Args:
        document: document with a mapping.
        source: name of the file in messages.
    """
    problems: list[Problem] = []
    for move in (_fields_beside_spec, _spec_in_spec, _spec_in_metadata, _name_at_the_top):
        document = move(document, source, problems)
    return document, problems


def _fields_beside_spec(document: Document, source: str, problems: list[Problem]) -> Document:
    """Move fields of `spec` from the top of a manifest into its empty or missing `spec`."""
    value = document.value
    names = [
        name
        for name in value
        if name not in _TOP and name != "name" and find_field(RLRunSpec, str(name), camel_only=True)
    ]
    if value.get("spec") is not None or not names:
        return document
    shown = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    line = document.lines.get(("spec",), document.lines.get((names[0],), document.line))
    fix = "indent" if "spec" in value else f"write spec: above {names[0]} and indent"
    problems.append(Problem(source, "spec", f"is empty; {fix} {shown} by two spaces below spec", line))
    moved = {name: value[name] for name in names}
    rest = {name: field for name, field in value.items() if name not in names}
    return _move_value(document, rest | {"spec": moved}, {(name,): ("spec", name) for name in names})


def _spec_in_spec(document: Document, source: str, problems: list[Problem]) -> Document:
    spec = document.value.get("spec")
    inner = spec.get("spec") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(inner, dict):
        return document
    problems.append(
        Problem(source, "spec.spec", "unknown field; remove the inner spec:", document.lines.get(("spec", "spec")))
    )
    outer = {name: field for name, field in spec.items() if name != "spec"}
    return _move_value(document, document.value | {"spec": inner | outer}, {("spec", "spec"): ("spec",)})


def _spec_in_metadata(document: Document, source: str, problems: list[Problem]) -> Document:
    metadata = document.value.get("metadata")
    inner = metadata.get("spec") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(inner, dict) or document.value.get("spec") is not None:
        return document
    message = "spec belongs at the top of the manifest: write spec: without the spaces before it"
    problems.append(Problem(source, "metadata.spec", message, document.lines.get(("metadata", "spec"))))
    rest = {name: field for name, field in metadata.items() if name != "spec"}
    return _move_value(document, document.value | {"metadata": rest, "spec": inner}, {("metadata", "spec"): ("spec",)})


def _name_at_the_top(document: Document, source: str, problems: list[Problem]) -> Document:
    """Move `name`, `namespace` and other fields of `metadata` from the top."""
    value, metadata = document.value, document.value.get("metadata", {})
    names = [name for name in value if name in ObjectMeta.model_fields and isinstance(value[name], str | dict)]
    if not names or not isinstance(metadata, dict) or any(name in metadata for name in names):
        return document
    for name in names:
        shown = (
            f"write metadata: {{{name}: {value[name]}}}"
            if isinstance(value[name], str)
            else f"move {name} into metadata"
        )
        problems.append(Problem(source, name, f"is a field of metadata; {shown}", document.lines.get((name,))))
    rest = {name: field for name, field in value.items() if name not in names}
    moved = metadata | {name: value[name] for name in names}
    return _move_value(document, rest | {"metadata": moved}, {(name,): ("metadata", name) for name in names})


def _move_value(document: Document, value: Any, places: dict[Key, Key]) -> Document:
    """Return the document with another value and the lines of the moved parts."""
    lines = dict(document.lines)
    for old, new in places.items():
        lines |= {(*new, *key[len(old) :]): line for key, line in document.lines.items() if key[: len(old)] == old}
    return replace(document, value=value, lines=lines)
