"""Defaults from a file that a user passes to a command: a ConfigMap, values of the operator's chart, or the content of one key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.files import read_text
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.defaults.team_defaults import TeamDefaults, apply_defaults, is_locked, read_defaults, refuse_locked
from rlrun.runtime.json_types import Json
from rlrun.runtime.printable import shorten_text

EVERYWHERE = "defaults.yaml"
"""Key with the defaults of all namespaces. The key `defaults.NAMESPACE.yaml` replaces it for one namespace."""
_SCALARS = (str, int, float)
_EXPECTED = (
    "contains no defaults for runs, expected a ConfigMap with the keys defaults.yaml and defaults.NAMESPACE.yaml, values of the operator's "
    "chart with runDefaults, or a mapping of spec and locked"
)


@dataclass
class GivenDefaults:
    """Defaults of a file, and their effect on a manifest."""

    defaults: Mapping[str, TeamDefaults]
    """Defaults by namespace. The empty name has those of all other namespaces."""
    namespace: str = ""
    """Namespace of the run; empty: the namespace in its manifest."""
    found: TeamDefaults | None = None
    """Defaults of the namespace of the last manifest."""
    taken: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def __call__(self, document: Json) -> Json:
        """Apply the defaults of a manifest's namespace, as the operator does."""
        metadata = document.get("metadata")
        own = metadata.get("namespace") if isinstance(metadata, dict) else None
        name = self.namespace or str(own or "default")
        self.found = self.defaults.get(name) or self.defaults.get("")
        result = apply_defaults(document, self.found)
        self.taken, self.refusals = result.taken, result.refusals
        return dict(result.run)

    def update_after_options(self, spec: RLRunSpec | None) -> None:
        """Update the result after options and environment variables have changed the last manifest."""
        if self.found is None or spec is None:
            return
        written = spec.model_dump(mode="json", by_alias=True)
        for path in self.taken:
            value, own = self.found.values[path], _value_at(written, path)
            if isinstance(value, _SCALARS) and isinstance(own, _SCALARS) and own != value:
                self.taken = tuple(each for each in self.taken if each != path)
                if is_locked(self.found, path):
                    self.refusals = (*self.refusals, refuse_locked(self.found, path, own))

    def problems(self, source: str) -> list[Problem]:
        """Return the refusals for the last manifest, with the operator's messages."""
        return [Problem(source, "", refused) for refused in self.refusals]

    def notices(self, source: str) -> list[Problem]:
        """Return notes about the fields that the manifest takes from the defaults."""
        if self.found is None:
            return [Problem(source, "", "there are no defaults for its namespace")]
        reason = f"from the defaults in ConfigMap {self.found.config_map}"
        shown = {path: shorten_text(str(self.found.values[path]), 120) for path in self.taken}
        ends = {path: "; it is locked" if is_locked(self.found, path) else "" for path in self.taken}
        return [Problem(source, f"spec.{path}", f"is {text}, {reason}{ends[path]}") for path, text in shown.items()]


def read_given(path: Path, namespace: str = "") -> GivenDefaults:
    """Read the defaults of a file.

    Args:
        path: YAML file.
        namespace: namespace of the run; empty: the namespace in its manifest.

    Raises:
        ConfigError: The file contains no defaults.
    """
    text = read_text(path)
    try:
        documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except yaml.YAMLError as error:
        raise ConfigError([Problem(str(path), "", f"is not YAML: {shorten_text(str(error), 300)}")]) from None
    for document in documents:
        found = _read_texts(document, path)
        if found is not None:
            name, texts = found
            return GivenDefaults(
                {_key_namespace(key): read_defaults(text, name, key) for key, text in texts.items()}, namespace
            )
    raise ConfigError([Problem(str(path), "", _EXPECTED)])


def _read_texts(document: Json, path: Path) -> tuple[str, dict[str, str]] | None:
    """Return the name of the ConfigMap and the text of each key, or None for other documents."""
    if document.get("kind") == "ConfigMap":
        metadata, data = document.get("metadata") or {}, document.get("data") or {}
        texts = {key: str(value) for key, value in data.items() if key == EVERYWHERE or _key_namespace(key)}
        return (f"{metadata.get('namespace', 'default')}/{metadata.get('name')}", texts) if texts else None
    given = document.get("runDefaults")
    if isinstance(given, dict):
        if named := given.get("configMap"):
            problem = f"the defaults are in ConfigMap {named}; pass the output of kubectl get configmap {named} -o yaml"
            raise ConfigError([Problem(str(path), "runDefaults.configMap", problem)])
        blocks = {EVERYWHERE: given.get("all")}
        blocks |= {f"defaults.{name}.yaml": block for name, block in (given.get("namespaces") or {}).items()}
        return f"of {path}", {key: yaml.safe_dump(block) for key, block in blocks.items() if block}
    if document and document.keys() <= {"spec", "locked"}:
        return f"of {path}", {EVERYWHERE: yaml.safe_dump(document)}
    return None


def _key_namespace(key: str) -> str:
    """Return the namespace of a key; empty: all namespaces, or not a key of defaults."""
    if not (key.startswith("defaults") and key.endswith(".yaml")):
        return ""
    return key.removeprefix("defaults").removesuffix(".yaml").strip(".")


def _value_at(block: object, path: str) -> object:
    for name in path.split("."):
        block = block.get(name) if isinstance(block, dict) else None
    return block
