"""Roles that are started one by one, with hand-written files: default values of omitted fields, and one identity for all roles of a folder.

The first role that starts in a folder writes the run's name and UID there, and the others use them. Files rendered by a launcher contain
all fields and are used unchanged.
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from pathlib import Path
from typing import TypeVar

from rlrun.config.loading.layers import Layer
from rlrun.config.loading.problems import Problem
from rlrun.config.models.roles import MAX_STEPS, SEED, SEQ_LEN, RoleConfig, micro_batch_tokens
from rlrun.protocol.files.durable import create_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import recorded_run
from rlrun.runtime import exit_codes

RoleT = TypeVar("RoleT", bound=RoleConfig)
Identity = tuple[str, str]
"""Name and UID of a run."""
DEFAULT_NAME = "rl"
"""Name of a run whose files contain neither name nor folder."""
UNCLAIMED = "00000000-0000-0000-0000-000000000000"
"""UID of a run that has none yet."""
DEFAULTS: dict[str, object] = {
    "max_steps": MAX_STEPS,
    "seq_len": SEQ_LEN,
    "seed": SEED,
    "algorithm": {},
    "environments": [],
    "sampling": {},
    "evaluation": None,
    "checkpoint": {},
    "weight_sync": {},
}
"""Fields that a hand-written file may omit, as in a manifest. They are not defaults of the configuration classes, because a file that was
rendered from a manifest contains all of them and its format has a hash (docs/decisions/0006)."""
_EXAMPLES = {
    "model": 'model = {name = "Qwen/Qwen3-0.6B"}',
    "environments": 'environments = [{id = "reverse-text", group_size = 8}]',
    "data": 'data = {sources = [{path = "chats.jsonl"}]}',
}
"""Examples of fields without a default, for messages. `default_texts` shows no default for these fields."""


def default_texts(model: type[RoleConfig]) -> dict[str, str]:
    """Return the text `default: ...` in the help for fields that the class requires but a hand-written file may omit, by Python names.

    Their default values come from the folder, from other fields, or from `DEFAULTS`. A field whose default is an empty table has an empty
    text: the help shows the defaults of its own fields.
    """
    # Later entries replace earlier ones, so the order of the statements matters.
    of_folder = {
        "name": f"the name in output_dir, or {DEFAULT_NAME}",
        "uid": "the UID of the folder's run",
        "output_dir": "runs/<name>",
        "max_model_len": "seq_len",
        "micro_batch_tokens": "seq_len, at least 4096",
    }
    values = {name: json.dumps(value) for name, value in DEFAULTS.items() if name not in _EXAMPLES}
    states = {name: f"default: {value}" for name, value in (of_folder | values).items()}
    states |= {name: "" for name, value in DEFAULTS.items() if value == {}}
    states["environments"] = "required for task RL"
    return {name: state for name, state in states.items() if name in model.model_fields}


def default_folder(name: str) -> str:
    """Return the folder of a run that names none, relative to the working directory."""
    return str(Path("runs") / name)


def read_identity(paths: RunPaths) -> Identity | None:
    """Return name and UID of the run in a folder, written by `claim_identity` or a launcher, or None for an unused folder.

    Raises:
        RoleError: the record is damaged.
    """
    if (recorded := recorded_run(paths)) is not None:
        return recorded.name, recorded.uid
    try:
        document = json.loads(paths.identity.read_text())
        return str(document["name"]), str(document["uid"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise RoleError(f"{paths.identity} is damaged; remove it before a role starts", exit_codes.DATA) from None


def complete_role_file(model: type[RoleConfig], layer: Layer) -> None:
    """Fill in omitted fields of a role's file that follow from other fields; fields without a default become one problem with an example.

    Args:
        model: configuration class of the role.
        layer: values of all sources, by Python names; changed in place. An unknown UID becomes `UNCLAIMED`.

    Raises:
        RoleError: the folder's record of its run is damaged.
    """
    values = layer.values
    _report_missing_inputs(model, layer)
    _identify_run(layer)
    for name, default in DEFAULTS.items():
        if name in model.model_fields and model.model_fields[name].is_required() and name not in values:
            values[name] = copy.copy(default)
    seq_len = values["seq_len"]  # set above: all roles require it
    if isinstance(seq_len, int):
        for name, derived in (("max_model_len", seq_len), ("micro_batch_tokens", micro_batch_tokens(seq_len))):
            if name in model.model_fields and values.get(name) is None:
                values[name] = derived


def claim_identity(config: RoleT) -> RoleT:
    """Return the configuration with the UID of its folder's run; the first role creates it.

    Raises:
        RoleError: the folder belongs to another run.
        OSError: the volume refuses the write.
    """
    if config.uid != UNCLAIMED:
        return config
    paths = RunPaths(Path(config.output_dir))
    identity = read_identity(paths)
    if identity is None:
        try:
            mine = (config.name, str(uuid.uuid4()))
            create_json(paths.identity, {"name": mine[0], "uid": mine[1]})
            identity = mine
        except FileExistsError:  # another role has created the file since the read
            identity = read_identity(paths)
    assert identity is not None
    if identity[0] != config.name:
        raise RoleError(_other_run_error(identity[0], config.name, config.output_dir), exit_codes.CONFIGURATION)
    return config.model_copy(update={"uid": identity[1]})


def _identify_run(layer: Layer) -> None:
    """Fill in name, UID and output folder of a role's file from the values that are set and from the folder's recorded run.

    A value that contradicts the recorded run becomes a problem.
    """
    values = layer.values
    given = {key: values[key] for key in ("name", "uid", "output_dir") if isinstance(values.get(key), str)}
    if any(key in values and key not in given for key in ("name", "uid", "output_dir")):
        return  # a value is invalid, which the model reports
    folder = Path(given.get("output_dir") or default_folder(given.get("name", DEFAULT_NAME))).absolute()
    recorded = read_identity(RunPaths(folder)) if len(given) < 3 else None
    derived = (_name_of(folder), UNCLAIMED) if recorded is None else recorded
    values["output_dir"] = str(folder)  # absolute: roles compare each other's paths, and may start in other directories
    values.setdefault("name", derived[0])
    values.setdefault("uid", derived[1])
    for at, key in enumerate(("name", "uid")):
        if recorded is not None and values[key] != recorded[at]:
            origin = layer.origin((key,))
            message = _other_run_error(recorded[at], values[key], folder)
            layer.problems.append(Problem(origin.source, origin.path or key, message, origin.line))


def _other_run_error(there: str, here: str, folder: Path | str) -> str:
    return f"got {here!r}, but the run in {folder} is {there!r}; set that value, or choose another output_dir"


def _name_of(folder: Path) -> str:
    """Return a run's name by RFC 1035 from the name of its folder."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:40].rstrip("-")
    return name if re.match(r"[a-z]", name) else f"{DEFAULT_NAME}-{name}"[:40].rstrip("-")


def _report_missing_inputs(model: type[RoleConfig], layer: Layer) -> None:
    """Report missing inputs of the run (model, and environments or data) as one problem with an example."""
    values = layer.values
    source = {"RL": "environments", "SFT": "data"}.get(str(values.get("task", "RL")))
    wanted = [name for name in ("model", source) if name in model.model_fields]
    missing = [name for name in wanted if name is not None and not values.get(name)]
    if not missing:
        return
    # A placeholder, so that the class does not report the missing model a second time.
    stand_in: dict[str, object] = {"model": {"name": "org/model"}}
    values.update({name: stand_in[name] for name in missing if name in stand_in})
    origin = layer.origin(())
    example = " and ".join(f"`{_EXAMPLES[name]}`" for name in missing)
    layer.problems.append(
        Problem(
            origin.source,
            ", ".join(missing),
            f"required, but not set, and without a default; add for example {example}",
            origin.line,
        )
    )
