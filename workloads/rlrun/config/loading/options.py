"""Options and environment variables as fields of a configuration model.

In the order of the file: the field for the dotted words of an option, with suggestions for unknown names; the words of a command line that
are an option's value, and the conversion of their text; environment variables with RLRun's prefix that are not fields but settings of
single processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlrun.config.loading.files import FORMATS
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


_NUMBERS = (Shape("int"), Shape("float"))
_PLAIN = ("str", "int", "float", "choice")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def parse_value(text: str, shape: Shape) -> Any:
    """Parse `text` for a field of this shape. Unparsable text is returned unchanged, and the model refuses it."""
    word = text.lower()
    if shape.nullable and (word == "null" or (word == "none" and shape.kind != "str")):
        return None
    if shape.kind == "bool" and word in _TRUE + _FALSE:
        return word in _TRUE
    if shape.kind == "int" and re.fullmatch(r"[-+]?\d{1,4000}", text, re.ASCII):
        return int(text)
    if shape.kind == "float" and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text, re.ASCII):
        return float(text)
    if shape.kind in ("str", "bool", "int", "float") or text in shape.choices:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    is_item = shape.kind == "list" and shape.parts[0].kind in _PLAIN and not isinstance(value, list | dict | None)
    return _as_list(text, shape.parts[0]) if is_item and text else value


def _as_list(text: str, item: Shape) -> list[object]:
    """Return a text as a list with one item. Numbers may be separated by commas."""
    words = text.split(",") if item.kind in ("int", "float") else [text]
    return [parse_value(word.strip() if len(words) > 1 else word, item) for word in words]


def has_value(rest: Sequence[str]) -> bool:
    """Return whether the next word is neither an option nor a file."""
    return bool(rest) and not rest[0].startswith(("--", "@"))


def take_value(rest: list[str], shape: Shape) -> object:
    """Take the words after an option that are its value. A flag and a table need no value."""
    if shape.kind == "bool":
        return rest.pop(0).lower() in _TRUE if has_value(rest) and rest[0].lower() in _TRUE + _FALSE else True
    if not has_value(rest):
        return {}
    several = take_values(rest) if shape.kind == "list" else [rest.pop(0)]
    if len(several) == 1:
        return parse_value(several[0], shape)
    return [parse_value(word, shape.parts[0]) for word in several]


def take_values(rest: list[str]) -> list[str]:
    """Take the values of an option: the words up to the next option or file. The first word may be the name of a file."""
    count = 0
    while count < len(rest) and not rest[count].startswith(("--", "@")):
        if count and Path(rest[count]).suffix in FORMATS:
            break
        count += 1
    taken, rest[:count] = rest[:count], []
    return taken


def parse_plain(text: str) -> object:
    """Parse a text without knowing its field."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "none", "null"):
        return None
    for shape in _NUMBERS:
        if not isinstance(value := parse_value(text, shape), str):
            return value
    return parse_value(text, Shape("any")) if text[:1] in ("[", "{", '"') else text


def broken_json(text: str) -> str | None:
    """Return why a text that starts like a JSON object or list is invalid, or None."""
    if not text.startswith(("{", "[")):
        return None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError):
        return "a number is too long, or it is nested too deeply"
    return None


_OPERATOR = "setting of the operator"
PROCESS_VARIABLES: Mapping[str, str] = {
    "RLRUN_API_KEY": "the secret that all roles of a run share",
    "RLRUN_ATTEMPT": "the attempt's number",
    "RLRUN_CONFIG": "configuration file of a pod",
    "RLRUN_CONFIG_MARK": "expected fingerprint of the pod's configuration file",
    "RLRUN_CRASHES": "folder of crash reports",
    "RLRUN_DEMONSTRATIONS": "file with the demonstrations of a tiny model's warm-up",
    "RLRUN_ENGINE": "start parameters of an engine's process",
    "RLRUN_ENVIRONMENT_HUB": "index of a hub of environments",
    "RLRUN_ENVIRONMENT_MARK": "mark of an environment's processes",
    "RLRUN_ENVIRONMENT_SOCKETS": "sockets of environments in their own containers",
    "RLRUN_ERROR_DIR": "folder of a role's error file",
    "RLRUN_GPU_LOCKS": "folder of the locks of this machine's GPUs",
    "RLRUN_LAUNCH_ID": "mark of the processes of one local launch",
    "RLRUN_MASTER_ADDR": "address of the trainer's first pod",
    "RLRUN_MASTER_PORT": "port of the trainer's rendezvous",
    "RLRUN_MODEL_CLASS": "import path of a run's own model class, for the processes of an engine",
    "RLRUN_MODEL_FOLDER": "folder of a tiny model, for the container that creates its demonstrations",
    "RLRUN_NAMESPACE": "namespace of a pod",
    "RLRUN_NNODES": "pods of the trainer",
    "RLRUN_NO_API_KEY": "name of a variable that is never set",
    "RLRUN_POD_IP": "address of a pod",
    "RLRUN_POD_NAME": "name of a pod",
    "RLRUN_POD_STATE": "folder that survives restarts of a pod's containers",
    "RLRUN_PROGRESS_LEASE": "Lease of the run's progress",
    "RLRUN_RESUME_REQUIRED": "set by a launcher that resumes a run; damaged checkpoints are an error",
    "RLRUN_HUB_QUICK": "no retries of requests to the hub, in checks of a run",
    "RLRUN_REVISIONS": "folder with the fixed commits of a run's models and data",
    "RLRUN_SHARED_ENVIRONMENTS_SOCKET": "socket of the shared container for environments without an image",
    "RLRUN_STACKS_FILE": "file for the stacks of a role that hangs",
    "RLRUN_TERMINATION_LOG": "file for a container's last message",
    "RLRUN_WARMUP": "a tiny model, for the container that creates its demonstrations",
    "RLRUN_ASSIGNED_USERS": _OPERATOR,
    "RLRUN_CLUSTER_DOMAIN": _OPERATOR,
    "RLRUN_HTTP_PORT": _OPERATOR,
    "RLRUN_DEFAULTS_FOLDER": _OPERATOR,
    "RLRUN_DEFAULTS_NAME": _OPERATOR,
    "RLRUN_IMAGE_PULL_POLICY": _OPERATOR,
    "RLRUN_INFERENCE_IMAGE": _OPERATOR,
    "RLRUN_LEASE_NAME": _OPERATOR,
    "RLRUN_LOG_FORMAT": _OPERATOR,
    "RLRUN_LOG_LEVEL": _OPERATOR,
    "RLRUN_NETWORK": _OPERATOR,
    "RLRUN_OPERATOR_NAME": _OPERATOR,
    "RLRUN_ORCHESTRATOR_IMAGE": _OPERATOR,
    "RLRUN_POLICY": _OPERATOR,
    "RLRUN_QUEUE": _OPERATOR,
    "RLRUN_READ_NODES": _OPERATOR,
    "RLRUN_TRAINER_IMAGE": _OPERATOR,
    "RLRUN_WATCH_NAMESPACES": _OPERATOR,
}
"""Variables with their meaning. No field has such a name."""
