"""Fields that the converters of several trainers set: model, name, steps, warm-up, adapters, data sets and Muon.

The Muon optimizers of verl and AReaL have several scales and variants of their updates. `trainer.optimizer` implements one of them, and all
others are refused.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlrun.config.layout_rules import Part
from rlrun.convert.draft import Draft, Field
from rlrun.convert.tables.row import ALL_LINEAR, MEGATRON_MODULES

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_VISION = re.compile(r"(?i)(?<![a-z])(vl|vlm|omni|internvl|minicpm-?[ov]|glm-?4(\.\d)?v|vision)(?![a-z])")
_NAME_MAX = 40
_DEPTH = 3
"""Minimum depth of an absolute folder that is searched for two files: `/srv/data`, not `/srv`."""
KNOWN_ROWS = {"openai/gsm8k": 7473, "gsm8k": 7473}
"""Rows of the training split of public data sets with a fixed size, by name or folder."""
ALL_TASKS = 1_000_000
"""Maximum of `evaluation.numTasks`: every held-out task."""
_PROJECTS: Mapping[str, str | None] = {
    "wandb": "project",
    "tensorboard": None,
    "mlflow": "experiment",
    "trackio": "project",
}
"""Trackers among verl's loggers, with their fields for the project."""


@dataclass(frozen=True)
class Context:
    """Inputs of a conversion in addition to the settings."""

    name: str
    """Name of the run if the settings have none."""
    rows: int | None = None
    """Rows of the training data, if the user provides them."""
    count: Callable[[str], int | None] = field(default=lambda _path: None)
    """Function that returns the rows of a local file, or None if the file does not exist."""


def at_home(path: str) -> str:
    """Return a path with `~` replaced by the home folder."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def is_on_hub(path: str) -> bool:
    """Return whether a path is the name of a repository, `org/name`; all others are folders."""
    return _HUB_NAME.fullmatch(path) is not None


def run_name(text: object, fallback: str) -> str:
    """Return a valid name of an RLRun that is as close as possible to `text`."""
    for candidate in (str(text or ""), fallback, "run"):
        name = re.sub(r"[^a-z0-9]+", "-", candidate.lower()).strip("-")[:_NAME_MAX].strip("-")
        if name and not name[0].isalpha():
            name = f"run-{name}"[:_NAME_MAX].strip("-")
        if name:
            return name
    return "run"


def name_run(draft: Draft, key: str, context: Context) -> Field:
    """Return `metadata.name` from a key, or otherwise from the file."""
    given = draft.has_value(key)
    name = Field(run_name(draft.get(key) if given else "", context.name), (key,) if given else ())
    draft.dropped[key] = "the name of the run comes from the file"
    return name


def put_model(draft: Draft, key: str) -> None:
    """Set `model.name` or `model.path`; a vision-language model is refused, because such files train on images."""
    path = draft.get(key)
    if not isinstance(path, str) or not path:
        draft.missing.append(f"spec.model: the model is missing; add {key}=ORG/NAME or a folder")
        draft.set_field("model.name", "Qwen/Qwen3-0.6B", note="a placeholder")
        return
    if _VISION.search(PurePosixPath(path).name):
        draft.refused[key] = (
            "training on images is not supported; for text only, convert with a text model's name and set model.name to this "
            "vision-language model"
        )
    draft.set_field("model.name" if is_on_hub(path) else "model.path", at_home(path), key)


def put_steps(draft: Draft, context: Context, *, epochs: str, batch: str, files: Sequence[str]) -> int | None:
    """Set `maxSteps` from epochs: rows times epochs divided by the prompts per batch. Returns the steps of one epoch, or None."""
    rows = context.rows or _rows_of(files, context)
    size, times = draft.get_integer(batch) or 1, draft.get_integer(epochs) or 1
    if rows is None:
        draft.set_field("maxSteps", 100, epochs, note="RLRun's default, because the number of rows is unknown")
        draft.missing.append(
            f"spec.maxSteps: the number of steps for {epochs}={times} depends on the rows of the data; add --rows N"
        )
        return None
    per_epoch = max(1, rows // size)
    draft.set_field("maxSteps", per_epoch * times, epochs, batch, note=f"{times} x {per_epoch} batches of {rows} rows")
    return per_epoch


def _rows_of(files: Sequence[str], context: Context) -> int | None:
    found = [
        context.count(file) or KNOWN_ROWS.get(file) or KNOWN_ROWS.get(PurePosixPath(file).parent.name) for file in files
    ]
    numbers = [number for number in found if number]
    return sum(numbers) if numbers and len(numbers) == len(found) else None


def compose_warmup(draft: Draft, ratio: str, *causes: str) -> None:
    """Set `trainer.scheduler.warmupSteps` from a fraction of all steps."""
    share = draft.get_number(ratio) or 0.0
    steps = draft.fields["maxSteps"].value
    if share > 0:
        # Both trainers truncate the product, like int().
        draft.set_field("trainer.scheduler.warmupSteps", int(share * steps), ratio, *causes, note=f"of {steps} steps")


def put_areal_warmup(draft: Draft) -> None:
    """Set the warm-up from AReaL's two keys; the number of steps overrides the fraction."""
    steps, share = "actor.optimizer.warmup_steps", "actor.optimizer.warmup_steps_proportion"
    if (number := draft.get_integer(steps)) is None:
        compose_warmup(draft, share)
    else:
        draft.set_field("trainer.scheduler.warmupSteps", max(0, number), steps)
        if draft.has_value(share):
            draft.dropped[share] = "warmup_steps overrides it"


def put_betas(draft: Draft, key: str) -> None:
    """Set both decays of AdamW from a key that contains the two."""
    betas = draft.get(key)
    if isinstance(betas, list) and len(betas) == 2:
        draft.set_field("trainer.optimizer.beta1", betas[0], key)
        draft.set_field("trainer.optimizer.beta2", betas[1], key)


def put_trainer(draft: Draft, trainer: Part, node: int, *causes: str) -> int:
    """Set pods and parallelism of an allocation's trainer; returns the number of pods.

    Args:
        draft: draft of the manifest.
        trainer: parallelism of the trainer.
        node: number of GPUs per node.
        causes: keys of the allocation.
    """
    pods = max(1, -(-trainer.gpus // node))
    if trainer.gpus % pods:
        draft.missing.append(
            f"{causes[0]}: {trainer.gpus} GPUs of the trainer do not divide by {pods} nodes with {node} GPUs; change one of them"
        )
    draft.set_field("trainer.replicas", pods, *causes)
    draft.set_field("trainer.gpusPerReplica", trainer.gpus // pods, *causes)
    for name, degree in (("tp", trainer.t), ("cp", trainer.c), ("ep", trainer.e), ("pp", trainer.p)):
        if degree > 1:
            draft.set_field(f"trainer.parallelism.{name}", degree, causes[0])
    return pods


def compose_interval(draft: Draft, part: str, per_epoch: int | None) -> tuple[int, str] | None:
    """Return the interval of AReaL's `<part>.freq_steps` or `freq_epochs` in steps, and its key; None if neither is usable."""
    steps, epochs = (draft.get_integer(f"{part}.freq_{unit}") for unit in ("steps", "epochs"))
    if steps is not None and steps > 0:
        return steps, f"{part}.freq_steps"
    if epochs is not None and epochs > 0 and per_epoch is not None:
        return epochs * per_epoch, f"{part}.freq_epochs"
    if epochs is not None and epochs <= 0:
        draft.dropped[f"{part}.freq_epochs"] = "an interval has at least one epoch; RLRun's default is used"
    elif draft.has_value(f"{part}.freq_epochs"):
        draft.dropped[f"{part}.freq_epochs"] = "the number of steps per epoch is unknown; RLRun's default is used"
    return None


def put_lora(draft: Draft, part: str, *, use: str | None = None) -> None:
    """Set `trainer.lora` from `<part>lora_rank`, `lora_alpha` and `target_modules`.

    Args:
        draft: draft of the manifest.
        part: prefix of the keys.
        use: key that enables adapters; None: a rank above 0 enables them.
    """
    rank, alpha, targets = (f"{part}{name}" for name in ("lora_rank", "lora_alpha", "target_modules"))
    size = draft.get_integer(rank) or 0
    if (use is not None and not draft.get_flag(use)) or (use is None and size <= 0):
        return
    draft.set_field("trainer.lora.rank", size or 32, *([use] if use is not None else []), rank)
    draft.set_field("trainer.lora.alpha", draft.get_number(alpha) or 16.0, alpha)
    written = draft.get(targets)
    names = [written] if isinstance(written, str) else written
    if isinstance(names, list) and names and names[0] not in ALL_LINEAR:
        draft.set_field(
            "trainer.lora.targets", [ours for name in names for ours in MEGATRON_MODULES.get(name, (name,))], targets
        )


def file_list(value: object) -> list[str]:
    """Return the files of a value that is one path or a list of paths."""
    items = value if isinstance(value, list) else [value]
    return [at_home(str(item)) for item in items if item]


def dataset_environments(train: Sequence[str], held_out: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """Return `dataset` environments of files: one per training file, with the closest held-out file.

    Returns:
        Environments, and whether every held-out file was assigned.
    """
    left = list(held_out)
    made: list[dict[str, Any]] = []
    for path in train:
        alike = [other for other in left if other.startswith("/") == path.startswith("/")]
        mine = max(alike, key=lambda other: len(os.path.commonpath([path, other])), default=None)
        args: dict[str, Any] = {"path": path}
        if mine is not None and (found := _join_arguments(path, mine)) is not None:
            args = found
            left.remove(mine)
        made.append({"id": "dataset", "name": _file_label(path, made), "args": args})
    return made, not left


def _join_arguments(train: str, held_out: str) -> dict[str, Any] | None:
    """Return the arguments for two files below one folder; None if they only share a root, or their names do not distinguish them."""
    folder = os.path.commonpath([train, held_out])
    depth = len(PurePosixPath(folder).parts) if folder else 0
    if depth < (_DEPTH if folder.startswith("/") else 1) or folder in (train, held_out):
        return None
    names = [PurePosixPath(os.path.relpath(path, folder)).parts for path in (train, held_out)]
    pair = next(((a, b) for a, b in zip(*(reversed(parts) for parts in names), strict=False) if a != b), None)
    return None if pair is None else {"path": folder, "train_split": pair[0], "eval_split": pair[1]}


def _file_label(path: str, made: Sequence[dict[str, Any]]) -> str:
    parts = PurePosixPath(path)
    stem = parts.parent.name if parts.stem in ("train", "training") and parts.parent.name else parts.stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "dataset"
    taken = {environment["name"] for environment in made}
    return name if name not in taken else f"{name}-{len(made) + 1}"


def put_trackers(draft: Draft) -> None:
    """Set the trackers among verl's loggers, with the project."""
    key, project = "trainer.logger", "trainer.project_name"
    loggers = re.findall(r"\w+", str(draft.get(key)))
    for tracker, name in _PROJECTS.items():
        if tracker in loggers and name and draft.has_value(project):
            draft.set_field(f"tracking.{tracker}", {name: str(draft.get(project))}, key, project)
        elif tracker in loggers:
            draft.set_field(f"tracking.{tracker}", {}, key)


_NAME = "trainer.optimizer.name"
_SCALE = 0.2
"""Factor of `sqrt(max(m, n))` in the update of an m x n matrix (Liu et al. 2025, arXiv:2502.16982)."""


@dataclass(frozen=True)
class MuonKeys:
    """Names and defaults of one trainer's Muon options."""

    block: str
    """Prefix of the keys."""
    optimizers: tuple[str, ...]
    """Keys that name the optimizer; the first one in the settings is used."""
    momentum: str
    fixed: Mapping[str, tuple[object, object]]
    """Options that RLRun does not have: (default in the other trainer, RLRun's fixed value)."""


VERL_FIXED: Mapping[str, tuple[object, object]] = {
    "muon_nesterov": (False, True),
    "muon_scale_mode": ("spectral", "spectral"),
    "muon_num_ns_steps": (5, 5),
    "muon_split_qkv": (True, True),
}
AREAL_FIXED: Mapping[str, tuple[object, object]] = {
    "muon_use_nesterov": (True, True),
    "muon_scale_mode": ("rms", "rms"),
    "muon_num_ns_steps": (5, 5),
}


def verl_muon(block: str) -> MuonKeys:
    """Return verl's keys below `block`, which ends with a dot."""
    return MuonKeys(block, ("optimizer", "name"), "muon_momentum", VERL_FIXED)


AREAL_MUON = MuonKeys("actor.optimizer.", ("type",), "muon_momentum", AREAL_FIXED)


def put_muon(draft: Draft, keys: MuonKeys) -> None:
    """Set the momentum of Muon, and refuse options whose updates differ from RLRun's."""
    name = draft.fields.get(_NAME)
    if name is None or name.value != "muon":
        return
    momentum = keys.block + keys.momentum
    if (value := draft.get_number(momentum)) is not None:
        draft.set_field("trainer.optimizer.momentum", value, momentum)
    wrong = [
        (key, theirs, ours)
        for key, (default, ours) in keys.fixed.items()
        if (theirs := _muon_value(draft, keys.block + key, default)) != ours
    ]
    if keys.fixed is VERL_FIXED:
        wrong += _update_scale(draft, keys.block)
        _note_coefficients(draft, keys.block)
    wrong += _second_rate(draft, keys.block)
    if wrong:
        _refuse_muon(draft, keys, wrong)


def _muon_value(draft: Draft, key: str, default: object) -> object:
    found = draft.get(key)
    return default if found is None else found


def _update_scale(draft: Draft, block: str) -> list[tuple[str, object, object]]:
    """Return the scale of verl's updates if it differs from RLRun's."""
    if draft.get_flag(block + "muon_match_adamw_update_rms"):
        betas = draft.get(block + "betas")
        first = float(betas[0]) if isinstance(betas, list) and betas else 0.9
        scale = math.sqrt((1 - first) / (1 + first))
    else:
        scale = draft.get_number(block + "muon_extra_scale_factor") or 1.0
    return [] if math.isclose(scale, _SCALE) else [("muon_extra_scale_factor", round(scale, 4), _SCALE)]


def _second_rate(draft: Draft, block: str) -> list[tuple[str, object, object]]:
    """Return AReaL's separate learning rate for vectors (AdamW) if it differs from Muon's."""
    own, rate = draft.get_number(block + "muon_backend_lr"), draft.get_number(block + "lr")
    return [] if own is None or own == rate else [("muon_backend_lr", own, rate)]


def _note_coefficients(draft: Draft, block: str) -> None:
    kind = _muon_value(draft, block + "muon_coefficient_type", "quintic")
    if kind != "simple":
        draft.notices.append(
            f"{block}muon_coefficient_type={kind}: RLRun orthogonalizes matrices with the coefficients of `simple`"
        )


def _refuse_muon(draft: Draft, keys: MuonKeys, wrong: list[tuple[str, object, object]]) -> None:
    """Refuse the optimizer, with the values that match RLRun's."""
    written = next((keys.block + key for key in keys.optimizers if draft.has_value(keys.block + key)), keys.block)
    theirs = ", ".join(f"{key} is {_show_value(value)}, in RLRun {_show_value(ours)}" for key, value, ours in wrong)
    fix = " ".join(f"{keys.block}{key}={_show_value(ours)}" for key, _, ours in wrong)
    if any(key == "muon_extra_scale_factor" for key, *_ in wrong) and draft.has_value(
        keys.block + "muon_match_adamw_update_rms"
    ):
        fix += f" {keys.block}muon_match_adamw_update_rms=false"
    draft.refused[written] = (
        f"Muon with different updates: {theirs}; choose a learning rate for RLRun's values, and add {fix}"
    )


def _show_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
