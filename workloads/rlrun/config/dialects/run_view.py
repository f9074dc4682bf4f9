"""View of a run in a layer, and the completion of data and policies of another project's configuration.

The view reads values and hints by path, and sets unset fields. The completion applies to supervised fine-tuning and evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlrun.config.dialects.translate import DIALECT, key_of
from rlrun.config.loading.layers import Layer, Origin
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.yaml_text import Key


@dataclass(frozen=True)
class RunView:
    """A run in a layer."""

    layer: Layer
    below: Key
    """Path of the run's description in the layer's values."""

    def get_hint(self, name: str) -> Any:
        """Return the value of a hint, or None."""
        found = self.layer.hints.get(name)
        return None if found is None else found.value

    def origin(self, name: str) -> Origin:
        """Return the origin of a hint, or of the first key with the other project's name."""
        return self.layer.hints.get(name, self.layer.hints[DIALECT]).origin

    def get(self, path: str) -> Any:
        """Return the value of a field, or None if it is not set."""
        value: Any = self.layer.values
        for part in (*self.below, *key_of(path)):
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value

    def set_field(self, path: str, value: Any, hint: str, *, over: bool = False, like: str = "") -> None:
        """Set an unset field. Nothing happens if the field would be inside a value that is not a table.

        Args:
            path: path of the field.
            value: value to set.
            hint: hint that the value comes from.
            over: whether to replace an existing value.
            like: field whose origin is used instead of the hint's, if it is set.
        """
        if self.get(path) is not None and not over:
            return
        *parents, last = key = (*self.below, *key_of(path))
        place: Any = self.layer.values
        for part in parents:
            inside = place.get(part) if isinstance(place, dict) else None
            if isinstance(place, list) and isinstance(part, int) and part < len(place):
                inside = place[part]
            elif isinstance(place, dict) and inside is None:
                inside = place.setdefault(part, {})
            if not isinstance(inside, dict | list):
                return
            place = inside
        if isinstance(place, dict):
            place[last] = value
            followed = self.layer.origins.get((*self.below, *key_of(like))) if like else None
            self.layer.origins[key] = followed or self.origin(hint)

    def report_notice(self, hint: str, text: str) -> None:
        """Report a notice at the place of a hint."""
        origin = self.origin(hint)
        self.layer.notices.append(Problem(origin.source, origin.path, text, origin.line))

    def refuse_hint(self, hint: str, text: str) -> None:
        """Refuse the value of a hint."""
        origin = self.origin(hint)
        self.layer.problems.append(Problem(origin.source, origin.path, text, origin.line))

    def environments(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the environments that are tables, with their indices."""
        found = self.get("environments")
        for i, environment in enumerate(found if isinstance(found, list) else ()):
            if isinstance(environment, dict):
                yield i, environment


def complete_data(run: RunView) -> None:
    """Set the sources of data from names of splits or subsets and their shares, or set fake data."""
    names = "splits" if run.get_hint("subsets") is None else "subsets"
    if names == "subsets":
        if run.get_hint("splits") is not None:
            run.refuse_hint(
                "subsets", "cannot be combined with splits; write data.sources with path or name, and split"
            )
            return
        run.report_notice(
            "subsets", "each subset becomes a source with the files and folders of that name, in every available split"
        )
    _list_sources(run, names)
    _kind_of_data(run)


def _list_sources(run: RunView, hint: str) -> None:
    """Set one source per name of a hint, as copies of the existing source, with their shares."""
    names, shares = run.get_hint(hint), run.get_hint("probabilities")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        run.refuse_hint(hint, f"got {names!r:.60}, expected a list of names")
    elif names:
        first = run.get("data.sources[0]")
        if isinstance(first, dict):
            sources = [first | {"split": name} for name in names]
            if isinstance(shares, list) and len(shares) == len(sources):
                sources = [source | {"weight": share} for source, share in zip(sources, shares, strict=True)]
            run.set_field("data.sources", sources, hint, over=True)
    elif shares is not None:
        run.refuse_hint("probabilities", "there is only one source; remove probabilities, or write several splits")


def _kind_of_data(run: RunView) -> None:
    """Set fake data, which has two names; refuse unknown kinds of data."""
    kind = run.get_hint("data_type")
    if kind == "fake" or run.get_hint("data_fake") not in (None, False):
        run.set_field("data.sources", [{"path": "fake"}], "data_type" if kind == "fake" else "data_fake")
    if kind not in (None, "sft", "fake"):
        run.refuse_hint("data_type", f"got {kind!r:.60}, expected sft or fake")


def complete_policies(run: RunView) -> None:
    """Evaluate the base model in addition to a run's policies, unless it is excluded."""
    base = run.get_hint("eval_base")
    if base is not None and not isinstance(base, bool):
        run.refuse_hint("eval_base", f"got {base!r:.60}, expected true or false")
    elif run.get_hint("eval_steps") is not None:
        run.set_field("policies.base", base is not False, "eval_steps" if base is None else "eval_base")
    elif base is False and run.get("policies.from_run") is None:
        run.refuse_hint("eval_base", "no policy would be evaluated; set weights_dir to a folder of policies")
    elif base is False:
        run.report_notice("eval_base", "the base model is evaluated too, unless steps selects the policies")
