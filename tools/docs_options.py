"""Tables of the options of advantages, losses and corrections."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from rlrun.config.algorithm.names import Option
from tools.docs_resource import cells


def option_table(options: Mapping[str, Option]) -> Iterable[str]:
    """Return rows of a table: option, default, allowed values, meaning."""
    yield from ("| option | default | values | meaning |", "|---|---|---|---|")
    for option, spec in options.items():
        meaning = spec.summary + (f"; needs a {spec.needs} model" if spec.needs else "")
        yield cells(f"`{option}`", f"`{json.dumps(spec.default)}`", _values(spec), meaning)


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in option.choices)
    if isinstance(option.default, bool):
        return "true, false"
    low = "" if option.low == -math.inf else f"{'>' if option.low_excluded else '≥'} {option.low:g}"
    high = "" if option.high == math.inf else f"≤ {option.high:g}"
    return ", ".join(filter(None, (low, high, "null" if option.nullable else "")))


def given(options: Mapping[str, object]) -> str:
    """Return the options that a preset sets, after its name; empty without any."""
    return f" {json.dumps(dict(options))}" if options else ""
