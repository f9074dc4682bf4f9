"""Names of options and variables: the field for dotted words, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, pairwise

from pydantic import BaseModel

from rlrun.config.loading.layers import Reader
from rlrun.config.loading.problems import COMMAND_LINE
from rlrun.config.loading.schema import Shape, child_shape, field_shapes, find_field, list_few, spell_name, suggest_key
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean


def negated_field(name: str, reader: Reader) -> tuple[Key, Shape] | None:
    """Return the field that `--no-NAME` disables, or None if there is no such field or it needs a value."""
    positive = without_no(name)
    found = "" if positive is None else resolve_option(reader, positive.split("."))
    return found if not isinstance(found, str) and (found[1].kind == "bool" or found[1].nullable) else None


def shape_at(model: type[BaseModel], key: Key) -> Shape:
    """Return the shape of the field at a path of Python names."""
    shape = Shape("model", model=model)
    for part in key:
        shape = child_shape(shape, part)
    return shape


def without_no(name: str) -> str | None:
    """Return `a.flag` for `no-a.flag` and `a.no-flag`."""
    head, dot, last = name.rpartition(".")
    for prefix in ("no-", "no_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
        if last.startswith(prefix):
            return head + dot + last.removeprefix(prefix)
    return None


def resolve_option(reader: Reader, words: Sequence[str]) -> tuple[Key, Shape] | str:
    """Return the field for dotted words, or the end of the message if there is no such field."""
    shape = Shape("model", model=reader.model)
    key: Key = ()
    for depth, word in enumerate(words):
        if shape.kind == "model" and shape.model is not None:
            name = find_field(shape.model, word if key else reader.aliases.get(word, word))
            if name is None:
                return suggest_names(reader, words, depth, shape.model)
            key, shape = (*key, name), field_shapes(shape.model)[name]
        elif shape.kind == "list":
            if not word.isdecimal() or len(word) > 6:
                return f": {word!r} is not an index of a list; write a number from 0"
            key, shape = (*key, int(word)), child_shape(shape, 0)
        elif shape.kind == "mapping":
            key, shape = (*key, word), child_shape(shape, word)
        else:
            return f": {'.'.join(words[:depth])} has no fields"
    return key, shape


def nearest_option(shown: str, also: Collection[str], model: type[BaseModel]) -> str:
    """Suggest an option of the command itself if its name is closer than every field's name; otherwise return an empty string."""
    options = [f"--{spell_name(model, name, 'kebab')}" for name in model.model_fields]
    hint = did_you_mean(shown, [*options, *also]) if "." not in shown else ""
    return hint if any(hint == f" (did you mean {option}?)" for option in also) else ""


def suggest_names(reader: Reader, words: Sequence[str], depth: int, model: type[BaseModel]) -> str:
    """Suggest names if the word at `depth` is not a field of `model`."""
    if reader.source == COMMAND_LINE:
        hint = suggest_key(model, words[depth], reader.model, "kebab")
        if hint.startswith(" (did you mean") and " or " not in hint:
            close = hint.removeprefix(" (did you mean ").removesuffix("?)")
            full = close if "." in close else ".".join((*words[:depth], close, *words[depth + 1 :]))
            if depth + 1 == len(words) or _spells_field(reader, full.split(".")):
                return f" (did you mean --{full}?)"
            return f"; known: {list_few(spell_name(model, name, 'kebab') for name in model.model_fields)}"
        if not depth and (close := did_you_mean(words[0], ("help", "dry-run"))):
            return close.replace("mean ", "mean --")
        return hint
    hint = suggest_key(model, words[depth], model, "snake")
    if not hint.startswith(" (did you mean"):
        return hint
    close = hint.removeprefix(" (did you mean ").removesuffix("?)")
    return f" (did you mean {reader.prefix}{'__'.join((*words[:depth], close, *words[depth + 1 :])).upper()}?)"


def dotted_field(reader: Reader, word: str) -> str:
    """Return the field for a word with dashes instead of dots, such as `model-name`, or an empty string."""
    parts = word.replace("_", "-").split("-")
    for dots in range(1, min(len(parts), 4)):
        for places in combinations(range(1, len(parts)), dots):
            bounds = (0, *places, len(parts))
            words = ["-".join(parts[a:b]) for a, b in pairwise(bounds)]
            if _spells_field(reader, words):
                return ".".join(words)
    return ""


def _spells_field(reader: Reader, words: Sequence[str]) -> bool:
    """Return whether dotted words name a field, or a key inside a free mapping."""
    shape = Shape("model", model=reader.model)
    for word in words:
        name = find_field(shape.model, word) if shape.model is not None else None
        if name is not None and shape.model is not None:
            shape = field_shapes(shape.model)[name]
        elif shape.kind in ("mapping", "any"):
            return True
        elif shape.kind == "list" and word.isdecimal():
            shape = shape.parts[0]
        else:
            return False
    return True
