"""A packed batch on disk: the samples of one step, independent of the number of ranks, with the origin of each token.

In `rollouts/step_00000123.a0003`, `samples.safetensors` contains all samples concatenated, and `batch.json` the data of each sample. The
format has version 2 if the batch has routes of a mixture, otherwise 1, which older releases read.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.durable import check_document, document_crc32, new_folder
from rlrun.protocol.files.routes import Routes, RoutesError, check_column, has_route, join_columns
from rlrun.runtime.printable import escape_controls

FORMAT_VERSION = 1
"""Version of batches without routes."""
ROUTED_VERSION = 2
"""Version of batches with routes; older releases refuse it instead of choosing other experts."""
NO_VERSION = -1
"""Version of a token that the policy did not sample."""
_COLUMNS: dict[str, type] = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
}
_SCALARS: dict[str, type] = {
    "temperature": float,
    "environment": str,
    "task_id": str,
    "group": int,
    "rollout": int,
    "dispatch_version": int,
    "reward": float,
}


class BatchError(ValueError):
    """Violation of an invariant of the batch format."""


@dataclass(frozen=True)
class Sample:
    """One training sequence: a prompt and all tokens after it.

    All arrays have shape `[T]`. Position `j` describes token `j` given the tokens before it, so position 0 is never trained on.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    """True on sampled tokens that are trained on."""
    logprobs: npt.NDArray[np.float32]
    """Log-probability of the token at sampling time; 0 outside of the mask."""
    versions: npt.NDArray[np.int32]
    """Policy version that sampled the token; -1 outside of the mask."""
    advantages: npt.NDArray[np.float32]
    """Advantage per token; 0 outside of the mask."""
    temperature: float
    """Softmax temperature of the sampling."""
    environment: str
    task_id: str
    group: int
    """Number of the group within the run, in order of dispatch."""
    rollout: int
    """Number of the rollout within its group."""
    dispatch_version: int
    """Policy version of the engine when the group was dispatched."""
    reward: float
    truncated: bool = False
    """Whether a token limit ended its last answer, so that its last loss token is not the end of the episode."""
    routes: Routes | None = None
    """Experts that the engine chose for each token, `[T, L, K]` (`routes`). Default: every token is routed natively."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def check(self) -> None:
        """Check that the columns of the sample are consistent.

        Raises:
            BatchError: a column is wrong; the message names it.
        """
        length = len(self.input_ids)
        for name in _COLUMNS:
            column = getattr(self, name)
            if column.shape != (length,):
                raise BatchError(f"{name} has shape {column.shape}, input_ids has {length} tokens")
        if length < 2:
            raise BatchError(f"a sample needs at least 2 tokens, got {length}")
        if self.loss_mask[0]:
            raise BatchError("loss_mask[0] is true, but the first token is never predicted")
        if not np.isfinite(self.logprobs).all():
            raise BatchError("logprobs contains a value that is not finite")
        if not np.isfinite(self.advantages).all():
            raise BatchError("advantages contains a value that is not finite")
        if (self.logprobs[self.loss_mask] > 1e-3).any():
            raise BatchError("logprobs contains a positive value")
        if (self.versions[self.loss_mask] < 0).any():
            raise BatchError("a trained token has no policy version")
        if not math.isfinite(self.reward):
            raise BatchError(f"reward is {self.reward}, which is not a finite number")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise BatchError(f"temperature is {self.temperature}; it must be greater than 0")
        if self.routes is not None:
            try:
                check_column(self.routes, length)
            except RoutesError as error:
                raise BatchError(str(error)) from None


@dataclass(frozen=True)
class Validation:
    """Held-out samples whose loss the trainer measures around a step, without an update."""

    path: str
    """Folder of a batch of step 0."""
    before: bool = False
    """Whether to measure the policy before the step."""
    after: bool = False
    """Whether to measure the policy after the step."""


@dataclass(frozen=True)
class Dropped:
    """A discarded group: a run that reuses the batch also discards it, instead of sampling it again."""

    group: int
    reason: str
    mean_reward: float | None
    """Mean reward of the group; None if it failed."""
    next_group: int
    """Lowest group number that had not been dispatched at that time."""


@dataclass(frozen=True)
class Outcome:
    """Inputs of a rollout's advantage when the batch was built."""

    group: int
    """Number of the group within the run."""
    rollout: int
    """Number of the rollout within its group."""
    environment: str
    reward: float
    """Reward used for the advantage: the environment's reward minus the overlong penalty."""
    tokens: int
    """Sampled tokens of all sequences."""
    turns: int
    """Replies with at least one token."""
    masked: str | None = None
    """Filter that excluded its tokens from the loss, such as `overlongMask`, or None."""


@dataclass(frozen=True)
class Batch:
    """All samples of one step."""

    step: int
    attempt: int
    samples: tuple[Sample, ...]
    total_steps: int | None = None
    """Steps of the run that the data allows; None: `maxSteps`."""
    last: bool = False
    """Whether the data ends with this step."""
    validation: Validation | None = None
    """Measurement to make around the step."""
    dropped: tuple[Dropped, ...] = ()
    """Groups discarded since the previous batch, in order."""
    tasks: tuple[tuple[int, int], ...] = ()
    """Number of each group and index of its task in the environment's list; empty in supervised fine-tuning."""
    outcomes: tuple[Outcome, ...] = ()
    """Inputs of the advantages, in the order of the samples; empty in supervised fine-tuning and in batches of older releases."""

    @property
    def tokens(self) -> int:
        """Number of all tokens, including prompts."""
        return sum(len(sample) for sample in self.samples)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens inside the loss mask: the denominator of the global token mean."""
        return int(sum(sample.loss_mask.sum() for sample in self.samples))

    @property
    def max_version(self) -> int:
        """Newest policy version that sampled one of its tokens."""
        return max((int(s.versions.max()) for s in self.samples), default=NO_VERSION)


def write_batch(path: Path, batch: Batch) -> None:
    """Write a complete batch durably to its folder.

    Raises:
        BatchError: a sample violates an invariant; nothing is written.
        OSError: the volume refuses the write (full, read-only); nothing stays under the final name.
    """
    if not batch.samples:
        raise BatchError("a batch needs at least one sample")
    for index, sample in enumerate(batch.samples):
        try:
            sample.check()
        except BatchError as error:
            raise BatchError(
                f"sample {index} of step {batch.step} ({sample.environment} {sample.task_id}): {error}"
            ) from None
    columns = {
        name: np.concatenate([getattr(s, name).astype(kind, copy=False) for s in batch.samples])
        for name, kind in _COLUMNS.items()
    }
    routes = _joined_routes(batch)
    if routes is not None:
        columns["routes"] = routes
    document: dict[str, object] = {
        "format_version": FORMAT_VERSION if routes is None else ROUTED_VERSION,
        "step": batch.step,
        "attempt": batch.attempt,
        "samples": [
            {"length": len(s)}
            | {name: kind(getattr(s, name)) for name, kind in _SCALARS.items()}
            | (
                {"truncated": True} if s.truncated else {}
            )  # omitted if False, because older releases read the batch too
            for s in batch.samples
        ],
    }
    if routes is not None:
        document["routes"] = {"moe_layers": routes.shape[1], "top_k": routes.shape[2], "dtype": routes.dtype.name}
    if batch.total_steps is not None:
        document["total_steps"] = batch.total_steps
    if batch.last:
        document["last"] = True
    if batch.validation is not None:
        document["validation"] = asdict(batch.validation)
    if batch.dropped:
        document["dropped"] = [asdict(dropped) for dropped in batch.dropped]
    if batch.tasks:
        document["tasks"] = batch.tasks
    if batch.outcomes:
        document["outcomes"] = [asdict(outcome) for outcome in batch.outcomes]
    with new_folder(path, before_rename="batch.before_rename") as folder:
        content = save(columns)
        (folder / "samples.safetensors").write_bytes(content)
        document["samples_crc32"] = zlib.crc32(content)
        (folder / "batch.json").write_text(json.dumps(document | {"crc32": document_crc32(document)}))
    reach("batch.written")


def _joined_routes(batch: Batch) -> Routes | None:
    """Return the routes of all samples, or None if no token has a route."""
    try:
        return join_columns([sample.routes for sample in batch.samples], [len(sample) for sample in batch.samples])
    except RoutesError as error:
        raise BatchError(f"step {batch.step}: {error}") from None


def read_batch(path: Path, *, indices: Sequence[int] | None = None) -> Batch:
    """Read a batch.

    Args:
        path: folder of the batch.
        indices: samples to read (`samples` then contains only these); None: all.

    Raises:
        BatchError: the folder is missing, incomplete or of another format.
    """
    try:
        return _read_arrays(path, indices)
    except KeyError as error:
        raise BatchError(f"cannot read the batch in {path}: it has no {error}") from None
    except (
        Exception
    ) as error:  # any type: the content determines it, and another run's orchestrator may have written the file
        reason = str(error).splitlines() or [type(error).__name__]
        raise BatchError(escape_controls(f"cannot read the batch in {path}: {reason[0]}")) from None


def _read_arrays(path: Path, indices: Sequence[int] | None) -> Batch:
    document = json.loads((path / "batch.json").read_text())
    if document["format_version"] not in (FORMAT_VERSION, ROUTED_VERSION):
        raise BatchError(
            f"it has format {document['format_version']!s:.40}, this version reads {FORMAT_VERSION} and {ROUTED_VERSION}"
        )
    content = (path / "samples.safetensors").read_bytes()
    if check_document(document) and zlib.crc32(content) != document["samples_crc32"]:  # earlier releases: no checksum
        raise BatchError("the checksum of samples.safetensors differs from batch.json")
    columns = load(content)
    entries = document["samples"]
    validation = Validation(**document["validation"]) if "validation" in document else None
    dropped = tuple(Dropped(**entry) for entry in document.get("dropped", []))
    tasks = tuple((int(group), int(task)) for group, task in document.get("tasks", []))
    outcomes = tuple(Outcome(**entry) for entry in document.get("outcomes", []))
    ends = np.cumsum([entry["length"] for entry in entries])
    for name in _COLUMNS:
        if columns[name].shape != (ends[-1],):
            raise BatchError(f"{name} has shape {columns[name].shape}, but batch.json declares {ends[-1]} tokens")
    routes = _read_routes(columns, document, int(ends[-1]))
    samples = []
    for index in range(len(entries)) if indices is None else indices:
        entry = dict(entries[index])
        end, length = int(ends[index]), entry.pop("length")
        arrays = {name: columns[name][end - length : end] for name in _COLUMNS}
        own = None if routes is None else routes[end - length : end]
        samples.append(Sample(**arrays, **entry, routes=own if own is not None and has_route(own).any() else None))
    return Batch(
        document["step"],
        document["attempt"],
        tuple(samples),
        total_steps=document.get("total_steps"),
        last=document.get("last", False),
        validation=validation,
        dropped=dropped,
        tasks=tasks,
        outcomes=outcomes,
    )


def _read_routes(
    columns: Mapping[str, npt.NDArray[np.generic]], document: Mapping[str, Any], tokens: int
) -> Routes | None:
    """Return the routes of all samples; None in format 1."""
    if document["format_version"] == FORMAT_VERSION:
        return None
    declared, found = document["routes"], columns["routes"]
    shape = (tokens, declared["moe_layers"], declared["top_k"])
    if found.shape != shape or found.dtype.name != declared["dtype"]:
        raise BatchError(
            f"routes have shape {found.shape} ({found.dtype}), but batch.json declares {shape} ({declared['dtype']})"
        )
    return cast("Routes", found)
