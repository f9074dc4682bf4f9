"""Manifest of a run without defaults: built from fields, read from a file, changed by `field=value` words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlrun.api.resource import API_VERSION, KIND, RLRun, RLRunSpec, check_name
from rlrun.api.run_manifest import Variation, parse_manifest, the_run
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.files import read_text
from rlrun.config.loading.layers import Layer, Origin, Reader, merge_layers
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.schema import Shape, as_written, child_shape, find_field
from rlrun.config.loading.yaml_text import examine_yaml
from rlrun.inspect.run_changes import WordError
from rlrun.runs.blocks import plain_data
from rlrun.runtime.json_types import Json

_BUILT = "Run"
_SET = "Run.set"


@dataclass(frozen=True)
class Manifest:
    """A valid manifest."""

    document: Json
    """Resource with YAML names; only written fields are present."""
    text: str | None = None
    """Text from which it was read, if unchanged."""
    file: Path | None = None
    """File that contains this text."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.document["metadata"]["name"])

    @property
    def namespace(self) -> str | None:
        """Namespace in the manifest, or None."""
        found = self.document["metadata"].get("namespace")
        return None if found is None else str(found)

    def to_yaml(self) -> str:
        """Return the text of the manifest; for an unchanged file its text."""
        return (
            self.text if self.text is not None else yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True)
        )


def build_manifest(
    name: str, namespace: str | None, labels: Mapping[str, str] | None, spec: Mapping[str, object]
) -> Manifest:
    """Build a manifest from fields of a specification.

    Args:
        name: name of the run.
        namespace: namespace in the cluster.
        labels: labels of the resource.
        spec: fields by Python names; blocks are models or mappings.

    Raises:
        ConfigError: all problems, each with the field's Python name.
    """
    metadata: Json = {"name": name} | ({"namespace": namespace} if namespace else {})
    metadata |= {"labels": dict(labels)} if labels else {}
    return _judge_layer(_resource_layer(spec, _BUILT, metadata), metadata)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest from a file.

    Raises:
        ConfigError: all problems, with their lines.
    """
    return parse_text(read_text(path), str(path), file=path)


def parse_text(text: str, source: str, *, file: Path | None = None) -> Manifest:
    """Parse a manifest from a text; `source` is its name in messages."""
    parse_manifest(text, source)
    documents, _ = examine_yaml(text, source)
    alone = len(documents) == 1
    return Manifest(the_run(documents, source).value, text if alone else None, file if alone else None)


def manifest_from_mapping(document: Mapping[str, object]) -> Manifest:
    """Read a manifest from a mapping, such as parsed YAML or JSON.

    Raises:
        ConfigError: all problems.
    """
    return Manifest(
        parse_text(yaml.safe_dump(plain_data(document), sort_keys=False, allow_unicode=True), "mapping").document
    )


def change_fields(manifest: Manifest, words: Sequence[str], fields: Mapping[str, object]) -> Manifest:
    """Return a manifest with changed fields.

    Args:
        manifest: original manifest, which stays unchanged.
        words: `field.name=value`, like options of the command line; `null` removes a field.
        fields: fields by Python names; a block changes only its fields, and None removes a field.

    Raises:
        ConfigError: all problems.
    """
    metadata = manifest.document["metadata"]
    source = str(manifest.file) if manifest.file is not None else _BUILT
    layer = _resource_layer(manifest.document.get("spec") or {}, source, metadata)
    out = {path for word in words if (path := _taken_out(word))}
    layer = Variation([_change_option(word) for word in words if not _taken_out(word)]).merged_over(layer)
    layer.problems = [replace(one, source=_SET) if one.source == COMMAND_LINE else one for one in layer.problems]
    layer.origins = {
        key: replace(one, source=_SET, path=one.path.removeprefix("--"), style="snake")
        if one.source == COMMAND_LINE
        else one
        for key, one in layer.origins.items()
    }
    layer = merge_layers([layer, _resource_layer(fields, _SET, metadata)])
    return _judge_layer(layer, metadata, without={*out, *((name,) for name, value in fields.items() if value is None)})


def rename_run(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest with another name of the run.

    Raises:
        ConfigError: the name is invalid.
    """
    metadata = manifest.document["metadata"] | {"name": name}
    return _judge_layer(_resource_layer(manifest.document.get("spec") or {}, _BUILT, metadata), metadata)


def _split_change(word: str) -> tuple[str, str]:
    field, equals, value = word.removeprefix("--").removeprefix("spec.").partition("=")
    if not equals or not field:
        raise WordError(f"got {word!r}; expected field=value, such as trainer.replicas=2")
    return field, value


def _change_option(word: str) -> str:
    return "--" + "=".join(_split_change(word))


def _taken_out(word: str) -> tuple[str, ...]:
    """Return the Python names of the field that a word removes; empty if the word sets a field."""
    field, value = _split_change(word)
    if value != "null":
        return ()
    shape, path = Shape("model", model=RLRunSpec), []
    for part in field.split("."):
        known = find_field(shape.model, part) if shape.model is not None else None
        if known is None:
            raise WordError(
                f"{word}: unknown field {field}; list all fields with `kubectl explain rlrun.spec --recursive`"
            )
        path.append(known)
        shape = child_shape(shape, known)
    return tuple(path)


def _resource_layer(spec: Mapping[str, object], source: str, metadata: Json) -> Layer:
    """Return the layer of a resource whose fields have the names of the specification, without the prefix `spec.`."""
    given = plain_data(spec)
    inner = Reader(RLRunSpec, source, style="snake").read(given if isinstance(given, dict) else {})
    layer = Layer(
        values={"api_version": API_VERSION, "kind": KIND, "metadata": deepcopy(metadata), "spec": inner.values},
        origins={("spec", *key): origin for key, origin in inner.origins.items()},
        problems=inner.problems,
        notices=inner.notices,
        hints=inner.hints,
    )
    layer.origins |= {(): Origin(source, "", style="snake"), ("metadata",): Origin(source, "metadata", style="snake")}
    return layer


def _judge_layer(layer: Layer, metadata: Json, without: Collection[tuple[str, ...]] = ()) -> Manifest:
    try:
        check_name(str(metadata["name"]))
    except ValueError as error:
        raise ConfigError([Problem(_BUILT, "name", str(error))]) from None
    for path in without:
        _remove_field(layer.values["spec"], path)
    validate_layer(RLRun, layer)
    spec = as_written(layer.values["spec"], Shape("model", model=RLRunSpec))
    return Manifest({"apiVersion": API_VERSION, "kind": KIND, "metadata": deepcopy(metadata), "spec": spec})


def _remove_field(values: dict[str, Any], path: tuple[str, ...]) -> None:
    for name in path[:-1]:
        values = values.get(name) or {}
    values.pop(path[-1], None)


def patch_of_fields(fields: Mapping[str, object]) -> Json:
    """Return a merge patch of `spec` from fields by Python names; None removes a field.

    Raises:
        ConfigError: a field is unknown.
    """
    layer = Reader(RLRunSpec, _SET, style="snake").read(plain_data(fields))
    if layer.problems:
        raise ConfigError(layer.problems)
    return {"spec": as_written(layer.values, Shape("model", model=RLRunSpec))}


def manifest_from_resource(found: Json) -> Manifest:
    """Return the manifest of an object in the API server: with its defaults, without its status and managed metadata."""
    kept = ("name", "namespace", "labels", "annotations")
    metadata = {name: value for name, value in found["metadata"].items() if name in kept}
    return Manifest({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": found.get("spec") or {}})
