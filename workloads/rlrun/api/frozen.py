"""Mutable and immutable fields of a run that has begun, as CEL rules of the whole resource.

They read the status: an update of the spec sees the status as it is stored. Python has no such rules, as
only the API server knows the old object.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlrun.api.resource import IDENTITY_FIELDS, LIVE_FIELDS, RLRunSpec
from rlrun.api.rule import Rule, quoted
from rlrun.config.schema import fields, spelled

_BEGUN = "self.?status.?attempt.orValue(0)>0"
_SUSPENDED = "oldSelf.spec.?suspend.orValue(false)&&self.status.?phase.orValue('')=='Suspended'"
_SINCE = "since attempt {self.status.attempt} began"
_SCALARS = ("int", "choice")


def frozen_rules() -> list[Rule]:
    """`LIVE_FIELDS` may change at any time, `IDENTITY_FIELDS` never, `maxSteps` upwards, and all else while the run is suspended."""
    rest = _below({*LIVE_FIELDS, *IDENTITY_FIELDS})
    identity = {block: [name for name in names if _is_identity(block, name)] for block, names in _all().items()}
    return [
        Rule(
            f"!({_BEGUN})||{_SUSPENDED}||{_same(rest, coarse=True)}",
            f"frozen {_SINCE}: {{{_changed(rest)}}}; set spec.suspend to true and wait for phase Suspended, then edit and set it to false",
            ".spec",
        ),
        Rule(
            f"!({_BEGUN})||{_same(identity)}",
            f"fixed {_SINCE}: {{{_changed(identity)}}}; another value makes another run: create it under another name",
            ".spec",
        ),
        Rule(
            f"!({_BEGUN})||self.spec.maxSteps>=oldSelf.spec.maxSteps",
            f"maxSteps ({{self.spec.maxSteps}}) may only grow {_SINCE}; it is {{oldSelf.spec.maxSteps}}",
            ".spec.maxSteps",
        ),
    ]


def always_there(info: FieldInfo) -> bool:
    """Whether a block exists in every stored object: it is required, or its default is made of its fields' defaults alone."""
    return info.is_required() or (isinstance(info.default, BaseModel) and not info.default.model_fields_set)


def _all() -> dict[str, list[str]]:
    """Names of fields by block; "" holds those of the specification itself that are no block that is always there."""
    result: dict[str, list[str]] = {"": []}
    for name, info in RLRunSpec.model_fields.items():
        shape, alias = fields(RLRunSpec)[name], info.alias or name
        if shape.model is not None and always_there(info):
            result[alias] = [spelled(shape.model, part, "camel") for part in fields(shape.model)]
        else:
            result[""].append(alias)
    return result


def _is_identity(block: str, name: str) -> bool:
    return bool({block, _path(block, name)} & set(IDENTITY_FIELDS))


def _below(left_out: set[str]) -> dict[str, list[str]]:
    """`_all` without some fields and blocks."""
    return {
        block: [name for name in names if _path(block, name) not in left_out]
        for block, names in _all().items()
        if block not in left_out
    }


def _path(block: str, name: str) -> str:
    return f"{block}.{name}".lstrip(".")


def _same(compared: dict[str, list[str]], *, coarse: bool = False) -> str:
    """Whether nothing of `compared` has changed; `coarse`: a block of which every field is compared is compared whole."""
    whole = [block for block, names in compared.items() if coarse and block and names == _all()[block]]
    parts = {"": [*compared[""], *whole]} | {b: n for b, n in compared.items() if b and n and b not in whole}
    return "&&".join(
        f"{_listed(names)}.all(n,{_value('self', b)}=={_value('oldSelf', b)})" for b, names in parts.items()
    )


def _changed(compared: dict[str, list[str]]) -> str:
    """The paths of what has changed, numbers and choices of the specification itself with both values."""
    shapes = {info.alias or name: fields(RLRunSpec)[name] for name, info in RLRunSpec.model_fields.items()}
    valued = [name for name in compared[""] if shapes[name].kind in _SCALARS and not shapes[name].nullable]
    values = [
        f"self.spec.{n}==oldSelf.spec.{n}?[]:['{n} (%s, was %s)'.format([self.spec.{n},oldSelf.spec.{n}])]"
        for n in valued
    ]
    parts = [
        *(f"({value})" for value in values),
        _differing("", [name for name in compared[""] if name not in valued]),
        *(_differing(b, names) for b, names in compared.items() if b and names),
    ]
    return "+".join(parts)


def _differing(block: str, names: Iterable[str]) -> str:
    path = f"'{block}.'+n" if block else "n"
    return f"{_listed(names)}.map(n,{_value('self', block)}!={_value('oldSelf', block)},{path})"


def _value(root: str, block: str) -> str:
    return f"[dyn({root}.spec{'.' if block else ''}{block})[?n]]"


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(quoted(name) for name in names)}]"
