"""Reading an `RLRun` manifest as the API server would, with the line of every problem."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from rlrun.api.resource import API_VERSION, KIND, RLRun, RLRunSpec
from rlrun.api.variation import Variation
from rlrun.config.loading.examine import Examined, examine
from rlrun.config.loading.files import read_text
from rlrun.config.loading.layers import Layer, Reader
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.loading.yaml_text import Document, examine_yaml
from rlrun.runtime.json_types import Json

_TOML = (
    "is TOML, and a manifest is YAML: `rlrun convert {0} -o run.yaml` makes one of PRIME-RL's file; `rl @ {0}` (or sft, eval) "
    "starts it as it is, with --dry-run it shows what it means"
)
GROUP = API_VERSION.partition("/")[0]
Lay = Callable[[Json], Json]
"""From a manifest as it is written to one with its namespace's defaults (`rlrun.defaults.given.Laid`)."""


def read_manifest(path: Path, variation: Variation | None = None, lay: Lay | None = None) -> RLRun:
    """The one RLRun of a YAML (or JSON) file; documents of other kinds beside it are left alone.

    Args:
        path: the file.
        variation: options and variables that change it.
        lay: over defaults.

    Raises:
        ConfigError: every problem with its line.
    """
    return parse_manifest(read_text(path), str(path), variation, lay)[0]


def parse_manifest(
    text: str, source: str, variation: Variation | None = None, lay: Lay | None = None
) -> tuple[RLRun, Layer]:
    """As `read_manifest`, from a text that messages call `source`; with the origin of every field, for more checks."""
    examined, layer = examine_manifest(text, source, variation, lay)
    if examined.problems or examined.result is None:
        raise ConfigError(examined.problems)
    return examined.result, layer


def examine_manifest(
    text: str, source: str, variation: Variation | None = None, lay: Lay | None = None
) -> tuple[Examined[RLRun], Layer]:
    """As `parse_manifest`, with every problem beside what can be understood all the same.

    Raises:
        ConfigError: it is not YAML, or holds none or several RLRuns.
    """
    if source.lower().endswith(".toml"):
        raise ConfigError([Problem(source, "", _TOML.format(shlex.quote(source)))])
    documents, broken = examine_yaml(text, source)
    try:
        document = the_run(documents, source)
    except ConfigError as error:
        raise ConfigError([*broken, *error.problems]) from None
    wrong_type = _check_type(document, source)
    if wrong_type and not is_manifest(document.value):  # the fields of another type would only confuse
        raise ConfigError([*broken, *wrong_type])
    value = document.value | {"apiVersion": API_VERSION, "kind": KIND}
    value = value if lay is None else lay(value)
    layer = Reader(RLRun, source, document.lines, camel_only=True).read(value, line=document.line)
    layer.problems += [*broken, *wrong_type]
    if variation is not None:
        layer = variation.over(layer)
    return examine(RLRun, layer), layer


def manifest_text(spec: RLRunSpec, name: str) -> str:
    """A manifest of what a user has set, as YAML; without the variables of pods, whose values may be secrets.

    Args:
        spec: of the run.
        name: of the run.
    """
    import yaml

    pods = {role: {"env", "env_from"} for role in ("trainer", "inference", "orchestrator")}
    written = spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=pods)
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": written}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def the_run(documents: list[Document], source: str) -> Document:
    """The one RLRun among documents.

    Raises:
        ConfigError: there is none, or there are several.
    """
    mappings = [document for document in documents if isinstance(document.value, dict)]
    runs = [document for document in mappings if is_manifest(document.value)]
    if len(runs) == 1:
        return runs[0]
    if len(runs) > 1:
        lines = ", ".join(str(document.line) for document in runs)
        raise ConfigError(
            [Problem(source, "", f"holds {len(runs)} RLRuns (lines {lines}), expected exactly one; split the file")]
        )
    if len(documents) == 1 and mappings:
        return mappings[0]
    kinds = [str(document.value.get("kind")) for document in mappings]
    what = f"{len(documents)} documents ({', '.join(kinds)})" if kinds else "no mapping"
    raise ConfigError([Problem(source, "", f"holds {what if documents else 'nothing'}, expected exactly one {KIND}")])


def is_manifest(document: Json) -> bool:
    """True for a document that is an RLRun, as far as its kind or its apiVersion says."""
    kind, version = document.get("kind"), document.get("apiVersion")
    is_kind = isinstance(kind, str) and kind.lower() in (KIND.lower(), KIND.lower() + "s")
    return is_kind or (isinstance(version, str) and version.partition("/")[0] == GROUP)


def _check_type(document: Document, source: str) -> list[Problem]:
    """Problems of apiVersion and kind."""
    problems = []
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        line = document.lines.get((field,), document.line)
        if field not in document.value:
            problems.append(Problem(source, field, f"required, but not set; write {field}: {wanted}", line))
        elif (got := document.value[field]) != wanted:
            problems.append(Problem(source, field, f"got {str(got)[:80]!r}, expected {wanted}", line))
    return problems
