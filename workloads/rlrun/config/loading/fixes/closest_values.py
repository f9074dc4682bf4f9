"""Candidates for the intended value of a wrong field, the most likely first.

The first part proposes scalars: other units, upper and lower case, quotes and notations. The second part proposes values of another shape:
a list for a mapping, a block for a name, and the reverse. Candidates may be invalid; `repair` tests them.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlrun.config.loading.schema import Shape, field_shapes, find_field, snake_name, spell_name
from rlrun.config.suggest import close_name
from rlrun.runtime.redact import is_secret, is_token

_WORDS = {"true": True, "yes": True, "y": True, "on": True, "1": True, "enabled": True} | {
    "false": False, "no": False, "n": False, "off": False, "0": False, "disabled": False,
}  # fmt: skip
NOTHING = ("none", "null", "nil", "~", "")
"""Words that mean null."""
_SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32", "float": "float32",
    "rwx": "ReadWriteMany", "rwo": "ReadWriteOnce", "rox": "ReadOnlyMany", "rwop": "ReadWriteOncePod",
    "adam": "adamw", "train": "RL", "grpo": "RL", "finetune": "SFT", "evaluate": "Eval", "evaluation": "Eval",
    "flash_attention_2": "flash2", "flash_attn_2": "flash2", "flash_attn": "flash2", "fa2": "flash2",
    "flash_attention_3": "fa3", "flash_attn_3": "fa3", "flash_attention_4": "fa4", "flash_attn_4": "fa4",
    "kernels-community/flash-attn2": "flash2", "kernels-community/flash-attn3": "fa3", "kernels-community/vllm-flash-attn3": "fa3",
    "eager": "sdpa", "flex_attention": "flex", "olmo3_sink": "auto",
    "mse": "k2", "low_var_kl": "k3", "seq-mean-token-sum-norm": "constant_length",
}  # fmt: skip
"""Abbreviations and synonyms of choices, and names of transformers (attn_implementation), verl and PRIME-RL."""
_SECONDS = {
    "ms": 0.001,
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
}
_SECONDS |= {"d": 86400, "day": 86400, "w": 604800, "week": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_GIB = {"k": 1024.0**-2, "m": 1 / 1024, "g": 1.0, "t": 1024.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtpKMGTP])?([iI])?[bB]?(?:ytes)?")
_THOUSANDS = {"": 1, "k": 1000, "m": 10**6}
_QUOTES = "\"'`“”„‘’«»"


def closest_scalars(value: object, shape: Shape, name: str) -> Iterator[object]:
    """Yield candidates for a scalar of this shape, the most likely first.

    Args:
        value: given value.
        shape: shape of the field.
        name: name of the field, which may contain its unit.
    """
    if isinstance(value, list | dict) and len(value) == 1:
        only = value[0] if isinstance(value, list) else next(iter(value.values()))
        if not isinstance(only, list | dict):
            yield only
            yield from closest_scalars(only, shape, name)
        return
    text = value.strip().strip(_QUOTES).strip() if isinstance(value, str) else ""
    if shape.nullable and isinstance(value, str) and text.lower() in NOTHING:
        yield None
    if shape.kind == "bool":
        yield from _switch_values(value)
    elif shape.kind in ("int", "float"):
        for number in _number_values(value, text, name):
            is_whole = number == math.floor(number) if math.isfinite(number) else False
            yield int(number) if is_whole and abs(number) < 1e15 else number
    elif shape.kind == "choice":
        yield from _choice_values(value, shape)
    elif shape.kind == "str":
        yield from _string_values(value, text)


def _switch_values(value: object) -> Iterator[bool]:
    if isinstance(value, str | int | float) and (word := str(value).strip().strip(_QUOTES).lower()) in _WORDS:
        yield _WORDS[word]


def _number_values(value: object, text: str, name: str) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield value
        return
    if not isinstance(value, str):
        return
    text = re.split(r"\s*#", text)[0].rstrip(",; ").strip(_QUOTES)
    plain = re.sub(r"(?<=\d)_(?=\d)", "", text)
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+", plain):
        plain = plain.replace(",", "")
    if re.fullmatch(r"[-+]?\d+,\d+", plain):
        plain = plain.replace(",", ".")
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,15}", plain):
        yield int(plain, 16)
    elif re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", plain, re.ASCII):
        yield float(plain)
    elif found := re.fullmatch(r"([-+]?\d+(?:\.\d+)?)\s*%", plain):
        yield float(found[1]) / 100
    elif "seconds" in snake_name(name):
        if (seconds := _duration_seconds(plain)) is not None:
            yield seconds
    elif snake_name(name).endswith("_gib"):
        if (found := _SIZE.fullmatch(plain)) and (unit := (found[2] or "g").lower()) in _GIB:
            yield float(found[1]) * _GIB[unit]
    elif (found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM]?)(\s*[A-Za-z]+)?", plain)) and not (found[2] and found[3]):
        yield float(found[1]) * _THOUSANDS[found[2].lower()]
    elif found := re.fullmatch(r"([-+]?\d+(?:\.\d+)?)\s+[A-Za-z]+", plain):
        yield float(found[1])


def _duration_seconds(text: str) -> float | None:
    """Return a duration such as `10m`, `1h30m`, `PT10M` or `00:10:00` in seconds."""
    if found := re.fullmatch(r"(?:(\d+):)?(\d{1,2}):(\d{2})", text):
        hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return 3600.0 * hours + 60 * minutes + seconds
    text = re.sub(r"^p(?=\d|t)|t(?=\d)", "", text.lower())
    total, rest = 0.0, text
    for number, unit in _DURATION.findall(text):
        factor = _SECONDS.get(unit, _SECONDS.get(unit.rstrip("s")))
        if factor is None:
            return None
        total, rest = total + float(number) * factor, ""
    return None if rest else total


def _choice_values(value: object, shape: Shape) -> Iterator[object]:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return
    names = [str(choice) for choice in shape.choices]
    word = str(value).strip()
    if (synonym := _SHORT_NAMES.get(word.strip(_QUOTES).lower())) in names:
        word = synonym
    elif word not in names:
        word = close_name(word, names) or ""
    yield from (choice for choice in shape.choices if str(choice) == word)


def _string_values(value: object, text: str) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(value).lower()
    elif isinstance(value, int | float):
        yield str(value)
        yield f"{value}Gi"
        yield f"run-{value}"
    elif isinstance(value, str):
        spellings = list(_plain_spellings(text))
        yield from spellings
        yield from (spelling.lower() for spelling in spellings)
        if not re.search(r"[/:@<{$]", text):
            label = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
            yield from (name[:40].rstrip("-") for name in (label, f"run-{label}"))


def _plain_spellings(text: str) -> Iterator[str]:
    """Yield the text without parts that do not belong to a path, an address, a quantity or a name."""
    yield text
    if found := re.fullmatch(
        r"(?:https?://)?(?:[^/@\s]*@)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/\s]+/[^/\s?#]+).*", text
    ):
        yield found[1]
    if found := re.fullmatch(r"(?:hf|huggingface)://(?:datasets/)?(.+)", text):
        yield found[1]
    if text.startswith("file://"):
        yield text.removeprefix("file://")
    if text.startswith(("~", "$HOME", "${HOME}")):
        yield str(Path(os.path.expandvars(text)).expanduser())
    if text.startswith("/"):
        yield posixpath.normpath(text)
    if found := re.fullmatch(r"(https?://)[^/@]*@(.+)", text):
        yield found[1] + found[2]
    if re.fullmatch(r"[\w.-]+:\d+(/\S*)?", text):
        yield f"http://{text}"
    if found := re.fullmatch(r"(--[\w.-]+)\s+(\S+)", text):
        yield f"{found[1]}={found[2]}"
    if re.match(r"https?://", text):
        yield re.sub(r"^https?://", "", text)
    elif "://" in text:
        if "@" in text:
            yield f"{text.partition('://')[0]}://{text.rpartition('@')[2]}"
        yield "https://" + text.partition("://")[2].rpartition("@")[2]
    if found := _SIZE.fullmatch(text):
        unit = (found[2] or "").upper()
        binary = "i" if found[3] else ""
        yield f"{found[1]}{'k' if unit == 'K' and not binary else unit}{binary}"
        if not unit:
            yield f"{found[1]}Gi"
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s+[A-Za-z]+", text):
        yield found[1]
    if re.search(r"\s", text):
        yield re.sub(r"\s+", "", text)


_LEVELS = 3
"""Most blocks that are added around a value."""
_FIRST = ("name", "id", "preset", "path", "rank", "interval", "project", "size")
"""Fields that a short form of a block most likely sets, in order."""
_FILE = re.compile(r"[./~$]|.*\.(jsonl?|parquet|csv|arrow|safetensors)$")
_MAPPING_SIZE = re.compile(r"\d+(\.\d+)?[KMGTP]i?")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*[=:]\s*(.*?)\s*")


@dataclass(frozen=True)
class Surroundings:
    """Names around a value."""

    field: str
    """Name of the field."""
    run: str = "my"
    """Name of the run."""
    variable: str | None = None
    """Environment variable that the value belongs to."""


def closest_shapes(value: object, shape: Shape, around: Surroundings, levels: int = _LEVELS) -> Iterator[Any]:
    """Yield candidates of this shape in the manifest's spelling. They may be invalid."""
    if value is None or levels < 0:
        return
    if shape.nullable and (value is False or (isinstance(value, str) and value.strip().lower() in NOTHING)):
        yield None
    if shape.kind == "union":
        for part in shape.parts:
            yield from closest_shapes(value, part, around, levels)
    elif shape.kind == "list":
        yield from _list_shapes(value, shape.parts[0], around, levels)
    elif shape.kind == "mapping":
        yield from _mapping_shapes(value)
    elif shape.kind == "model" and shape.model is not None:
        yield from _block_shapes(value, shape.model, around, levels)
    else:
        yield from closest_scalars(value, shape, around.field)


def _list_shapes(value: object, item: Shape, around: Surroundings, levels: int) -> Iterator[list[object]]:
    if isinstance(value, list):
        fixed = [next(closest_shapes(entry, item, around, levels - 1), entry) for entry in value]
        if fixed != value:
            yield fixed
    elif isinstance(value, dict):
        if item.model is not None:
            if any(find_field(item.model, str(name)) for name in value):
                yield [value]
            entries = [named_entry(str(name), inner, item.model, around.run) for name, inner in value.items()]
            if all(entry is not None for entry in entries):
                yield list(entries)
        else:
            flag = "--" if snake_name(around.field).endswith("args") else ""
            yield [f"{flag}{name}={inner}" if inner is not True else f"{flag}{name}" for name, inner in value.items()]
    else:
        yield [value]
        if isinstance(value, str) and len(words := re.split(r"\s*,\s*|\s+", value.strip())) > 1:
            yield [*words]
        for candidate in closest_shapes(value, item, around, levels - 1):
            yield [candidate]


def named_entry(name: str, value: object, model: type[BaseModel], run: str) -> dict[str, object] | None:
    """Return the list item for `name: value`, or None if the items do not have such a short form."""
    known = [field for field in ("name", "id", "key") if field in model.model_fields]
    key = next((field for field in known if model.model_fields[field].is_required()), known[0] if known else None)
    if key is None:
        return None
    if isinstance(value, dict):
        return {key: name, **value}
    if value is None:
        return {key: name}
    if "value" not in model.model_fields:
        return None
    text = "true" if value is True else "false" if value is False else str(value)
    if "value_from" in model.model_fields and (is_secret(name) or is_token(text)):
        return {key: name, "valueFrom": {"secretKeyRef": {"name": f"{run}-keys", "key": name}}}
    return {key: name, "value": text}


def _mapping_shapes(value: object) -> Iterator[dict[str, object]]:
    if isinstance(value, str):
        value = re.split(r"\s*,\s*", value)
    if not isinstance(value, list):
        return
    found: dict[str, object] = {}
    for entry in value:
        if isinstance(entry, dict) and set(entry) in ({"name", "value"}, {"key", "value"}):
            found[str(entry.get("name", entry.get("key")))] = entry["value"]
        elif isinstance(entry, dict):
            found |= entry
        elif isinstance(entry, str) and (parts := _ASSIGNMENT.fullmatch(entry)):
            found[parts[1]] = parts[2]
        else:
            return
    if found:
        yield found


def _block_shapes(value: object, model: type[BaseModel], around: Surroundings, levels: int) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        if len(value) == 1:
            if isinstance(value[0], dict):
                yield value[0]
            yield from _block_shapes(value[0], model, around, levels)
        if value and all(isinstance(entry, dict) for entry in value):
            yield {name: inner for entry in value for name, inner in entry.items()}
        named = [next(_named_block(entry, model), {}) for entry in value if isinstance(entry, str)]
        if named and all(named) and len(named) == len(value):
            yield {name: inner for entry in named for name, inner in entry.items()}
        return
    if value is True:
        yield {}
    if isinstance(value, bool):
        if "enabled" in model.model_fields:
            yield {"enabled": value}
        return
    if isinstance(value, str):
        yield from _named_block(value, model)
        if (parts := _ASSIGNMENT.fullmatch(value)) and (entry := named_entry(parts[1], parts[2], model, around.run)):
            yield entry
    if isinstance(value, str | int | float):
        yield from _short_forms(value, model, around, levels)


def _named_block(word: str, model: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Yield the block with the field of that name: `tracking: wandb`."""
    name = find_field(model, word.strip())
    if name is not None and field_shapes(model)[name].kind == "model":
        yield {spell_name(model, name, "camel"): {}}


def _short_forms(value: object, model: type[BaseModel], around: Surroundings, levels: int) -> Iterator[dict[str, Any]]:
    """Yield blocks in which one field has the value: `model: org/name`."""
    known = field_shapes(model)
    required = [name for name, info in model.model_fields.items() if info.is_required()]
    if around.variable is not None and set(required) == {"name", "key"}:
        yield {"name": value, "key": around.variable}
    if "value_from" in known or "secret_key_ref" in known:  # the value should be in a Secret
        yield {"secretKeyRef": {"name": f"{around.run}-keys", "key": around.variable or "token"}}
    if isinstance(value, str) and _MAPPING_SIZE.fullmatch(value):  # `storage: 50Gi`
        for name, shape in known.items():
            if shape.kind == "model" and shape.model is not None and "size" in field_shapes(shape.model):
                yield {spell_name(model, name, "camel"): {"size": value}}
    first = ("path", *_FIRST) if isinstance(value, str) and _FILE.match(value) else _FIRST
    order = sorted(known, key=lambda name: first.index(name) if name in first else len(first))
    for name in order:
        if known[name].kind in ("str", "int", "float", "choice") and not isinstance(value, bool):
            yield {spell_name(model, name, "camel"): value}
    for name in order:
        if known[name].kind in ("model", "list") and (name in required or known[name].nullable):
            for inner in closest_shapes(value, known[name], around, levels - 1):
                if inner is not None:
                    yield {spell_name(model, name, "camel"): inner}
