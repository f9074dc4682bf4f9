"""A packed batch on disk: the samples of one step, neutral to the number of ranks, each token with where it came from.

`rollouts/step_00000123.a0003/samples.safetensors` holds all samples end to end, `batch.json` what is known of each sample.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.durable import check_document, document_crc32, new_folder
from rlrun.runtime.printable import printable

FORMAT_VERSION = 1
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
    """A batch breaks an invariant of the protocol."""


@dataclass(frozen=True)
class Sample:
    """One training sequence: a prompt and everything after it.

    All arrays are `[T]`. Position `j` describes token `j` given those before it, so position 0 is never trained on.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    """True on tokens that the policy sampled and that are trained on."""
    logprobs: npt.NDArray[np.float32]
    """Log-probability that the token was sampled with; 0 outside the mask."""
    versions: npt.NDArray[np.int32]
    """Policy version that sampled the token; -1 outside the mask."""
    advantages: npt.NDArray[np.float32]
    """Advantage per token; 0 outside the mask."""
    temperature: float
    """Softmax temperature that the tokens were sampled with."""
    environment: str
    task_id: str
    group: int
    """Number of the group within the run, in order of dispatch."""
    rollout: int
    """Number of the rollout within its group."""
    dispatch_version: int
    """Policy version that the engine held when the group was dispatched."""
    reward: float
    truncated: bool = False
    """True if a limit of tokens ended its last answer, so that its last loss token is not the end of the episode."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def check(self) -> None:
        """Refuse a sample whose columns do not belong together.

        Raises:
            BatchError: names the column.
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
            raise BatchError("logprobs has a value that is not finite")
        if not np.isfinite(self.advantages).all():
            raise BatchError("advantages has a value that is not finite")
        if (self.logprobs[self.loss_mask] > 1e-3).any():
            raise BatchError("logprobs has a positive value")
        if (self.versions[self.loss_mask] < 0).any():
            raise BatchError("a trained token has no policy version")
        if not math.isfinite(self.reward):
            raise BatchError(f"reward is {self.reward}, which is not a finite number")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise BatchError(f"temperature is {self.temperature}; it must be greater than 0")


@dataclass(frozen=True)
class Validation:
    """Held-out samples whose loss the trainer measures around a step, without an update."""

    path: str
    """Folder of a batch of step 0."""
    before: bool = False
    """Measure the policy that the step starts from."""
    after: bool = False
    """Measure the policy that the step makes."""


@dataclass(frozen=True)
class Dropped:
    """A group that was given up: a run that takes a batch over gives it up too, instead of sampling it again."""

    group: int
    reason: str
    mean_reward: float | None
    """None when it failed."""
    next_group: int
    """The lowest number that was not dispatched then."""


@dataclass(frozen=True)
class Outcome:
    """Inputs of a rollout's advantage, as they were when the batch was made."""

    group: int
    """Number of the group within the run."""
    rollout: int
    """Number of the rollout within its group."""
    environment: str
    reward: float
    """The reward that the advantage is made of: the environment's, less the overlong penalty."""
    tokens: int
    """Tokens that the policy sampled, of all sequences."""
    turns: int
    """Replies with a token."""
    masked: str | None = None
    """The filter that took the loss from its tokens, such as `overlongMask`; None: they are trained on."""


@dataclass(frozen=True)
class Batch:
    """All samples of one step."""

    step: int
    attempt: int
    samples: tuple[Sample, ...]
    total_steps: int | None = None
    """Steps of the run as far as the data reaches; None: `maxSteps`."""
    last: bool = False
    """True if the data ends with this step."""
    validation: Validation | None = None
    """Measurement to make around the step."""
    dropped: tuple[Dropped, ...] = ()
    """Groups that were given up since the batch before, in that order."""
    tasks: tuple[tuple[int, int], ...] = ()
    """Number of each group and index of its task in the environment's list; empty in supervised fine-tuning."""
    outcomes: tuple[Outcome, ...] = ()
    """Inputs of the advantages, in the order of the samples; empty in supervised fine-tuning, and in batches that older releases wrote."""

    @property
    def tokens(self) -> int:
        """All tokens, prompts included."""
        return sum(len(sample) for sample in self.samples)

    @property
    def loss_tokens(self) -> int:
        """Tokens inside the loss mask: the denominator of the global token mean."""
        return int(sum(sample.loss_mask.sum() for sample in self.samples))

    @property
    def max_version(self) -> int:
        """Newest policy version that sampled one of its tokens."""
        return max((int(s.versions.max()) for s in self.samples), default=NO_VERSION)


def write_batch(path: Path, batch: Batch) -> None:
    """Write a batch, durable and whole, to its folder.

    Raises:
        BatchError: a sample breaks an invariant; nothing is written.
        OSError: the volume refuses (full, read-only); nothing is left under the final name.
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
    document: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "step": batch.step,
        "attempt": batch.attempt,
        "samples": [
            {"length": len(s)}
            | {name: kind(getattr(s, name)) for name, kind in _SCALARS.items()}
            | ({"truncated": True} if s.truncated else {})  # left out otherwise: older releases read the batch too
            for s in batch.samples
        ],
    }
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


def read_batch(path: Path, *, indices: Sequence[int] | None = None) -> Batch:
    """Read a batch.

    Args:
        path: its folder.
        indices: read only these samples (the others are left out of `samples`); default: all.

    Raises:
        BatchError: the folder is missing, incomplete or of another format.
    """
    try:
        return _read_arrays(path, indices)
    except KeyError as error:
        raise BatchError(f"cannot read the batch in {path}: it has no {error}") from None
    except Exception as error:  # of any kind: the file chooses, and another run's orchestrator may have written it
        reason = str(error).splitlines() or [type(error).__name__]
        raise BatchError(printable(f"cannot read the batch in {path}: {reason[0]}")) from None


def _read_arrays(path: Path, indices: Sequence[int] | None) -> Batch:
    document = json.loads((path / "batch.json").read_text())
    if document["format_version"] != FORMAT_VERSION:
        raise BatchError(f"it has format {document['format_version']!s:.40}, this version reads {FORMAT_VERSION}")
    content = (path / "samples.safetensors").read_bytes()
    if check_document(document) and zlib.crc32(content) != document["samples_crc32"]:  # earlier releases wrote none
        raise BatchError("samples.safetensors has another checksum than when it was written")
    columns = load(content)
    entries = document["samples"]
    validation = Validation(**document["validation"]) if "validation" in document else None
    dropped = tuple(Dropped(**entry) for entry in document.get("dropped", []))
    tasks = tuple((int(group), int(task)) for group, task in document.get("tasks", []))
    outcomes = tuple(Outcome(**entry) for entry in document.get("outcomes", []))
    ends = np.cumsum([entry["length"] for entry in entries])
    for name in _COLUMNS:
        if columns[name].shape != (ends[-1],):
            raise BatchError(f"{name} has shape {columns[name].shape}, batch.json tells of {ends[-1]} tokens")
    samples = []
    for index in range(len(entries)) if indices is None else indices:
        entry = dict(entries[index])
        end, length = int(ends[index]), entry.pop("length")
        arrays = {name: columns[name][end - length : end] for name in _COLUMNS}
        samples.append(Sample(**arrays, **entry))
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
