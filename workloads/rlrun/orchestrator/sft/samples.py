"""Training samples from rows in the order of the data mixture, and the position in the data.

The order of the rows is a pure function of the seed and the number of the draw, so that a resume needs only this
number. Sources take turns by their weights, as evenly as complete rows allow. Within a source each epoch visits all
rows once.

Batches consist of samples; skipped rows are counted. The pipeline's part of a checkpoint contains the position, and
fingerprints of the data.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlrun.config.models.data import DataConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.environments.dataset_rows import RowError, Rows
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.sft.chat_rows import read_conversation
from rlrun.orchestrator.sft.chat_samples import ChatEncoder, Encoded
from rlrun.orchestrator.tasks.curriculum import permute_position, share_out
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.files.checkpoint_manifest import ORCHESTRATOR_PART
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes


class Draw(NamedTuple):
    """Result of a draw."""

    source: int
    """Index of the source."""
    row: int
    """Index of the row in the source."""
    epoch: int
    """Number of complete passes over its rows before this draw."""


@dataclass(frozen=True)
class Mixture:
    """Order of all rows of a run.

    Args:
        seed: seed of the run.
        sizes: number of rows of each source.
        weights: relative shares of rows, positive numbers.
        shuffle: whether each epoch has a new order; otherwise the order of the files.
        epochs: number of passes over the data. None: unlimited.
        all_exhausted: whether the mixture ends when all sources are exhausted, instead of the first one.
    """

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    shuffle: bool = True
    epochs: int | None = None
    all_exhausted: bool = False

    def draw(self, number: int) -> Draw:
        """Return the result of draw `number` (from 0)."""
        source, index = share_out(number, self._shares)
        epoch, position = divmod(index, self.sizes[source])
        if not self.shuffle:
            return Draw(source, position, epoch)
        return Draw(source, permute_position(position, self.sizes[source], f"{self.seed}/data/{source}/{epoch}"), epoch)

    def counts(self, number: int) -> tuple[int, ...]:
        """Return the number of rows of each source among the first `number` draws."""
        return tuple(_count_shares(number, self._shares))

    @cached_property
    def length(self) -> int | None:
        """Number of draws until the mixture ends, or None if it never ends."""
        if self.epochs is None:
            return None
        low, high = 0, 1
        while not self._has_ended(high):
            high *= 2
        while high - low > 1:  # binary search: the counts only increase
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_ended(middle) else (middle, high)
        return high

    def _has_ended(self, number: int) -> bool:
        read = [count >= size * (self.epochs or 0) for count, size in zip(self.counts(number), self.sizes, strict=True)]
        return all(read) if self.all_exhausted else any(read)

    @cached_property
    def _shares(self) -> list[Fraction]:
        return [Fraction(str(weight)) for weight in self.weights]


def _count_shares(number: int, weights: Sequence[Fraction]) -> list[int]:
    """Compute the forks of `share_out` for all sources at once."""
    if len(weights) == 1:
        return [number]
    middle = len(weights) // 2
    left = sum(weights[:middle], Fraction(0))
    first = int(number * (left / sum(weights, Fraction(0))))
    return [*_count_shares(first, weights[:middle]), *_count_shares(number - first, weights[middle:])]


_POLICY = 0
"""Version of the tokens. No policy sampled them; version 0 is valid in every step."""


class Encoder:
    """Encoder of one run's rows into samples.

    Args:
        config: names of the columns, and handling of unusable rows.
        chat: tokenizer and chat template.
        seq_len: limit of a sample in tokens.
    """

    def __init__(self, config: DataConfig, chat: ChatEncoder, seq_len: int) -> None:
        self._config, self._chat, self._seq_len = config, chat, seq_len

    def encode(self, rows: Rows, index: int, counters: Counter[str]) -> Encoded | None:
        """Return a row's tokens, or None for a skipped row. `counters` count the reasons and the truncations.

        Raises:
            RoleError: the row is malformed or too long, and the configuration is set to fail.
        """
        config = self._config
        try:
            try:
                encoded = self._chat.encode(read_conversation(rows.row(index), config))
            except (ValueError, TemplateError) as error:
                raise (
                    error if isinstance(error, RowError) else RowError(f"{rows.describe_place(index)}: {error}")
                ) from None
        except RowError as error:
            if config.malformed == "Fail":
                raise RoleError(
                    f"{rows.label}: {error}; correct the row, or set data.malformed to Skip", exit_codes.DATA
                ) from None
            counters["skipped_malformed"] += 1
            return None
        if len(encoded) > self._seq_len:
            if config.too_long == "Fail":
                raise RoleError(
                    f"{rows.label}: {rows.describe_place(index)} has {len(encoded)} tokens, but seqLen is {self._seq_len}; "
                    "increase seqLen, or set data.tooLong to Truncate or Skip",
                    exit_codes.DATA,
                )
            if config.too_long == "Skip":
                counters["skipped_too_long"] += 1
                return None
            counters["truncated"] += 1
            encoded = encoded.cut(self._seq_len)
        if not encoded.weights.any():
            counters["skipped_nothing_learned"] += 1
            return None
        return encoded


def make_sample(encoded: Encoded, *, source: str, place: str, number: int) -> Sample:
    """Create a sample of the file protocol, with each token's weight in the column of its advantage."""
    mask = encoded.weights > 0
    return Sample(
        input_ids=encoded.input_ids,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, _POLICY, -1).astype(np.int32),
        advantages=encoded.weights,
        temperature=1.0,
        environment=source,
        task_id=place,
        group=number,
        rollout=0,
        dispatch_version=_POLICY,
        reward=0.0,
    )


@dataclass(frozen=True)
class Position:
    """Position of a run in its data; a checkpoint needs nothing else, whatever the number of ranks."""

    draws: int = 0
    """Rows drawn so far, skipped ones included."""
    counters: dict[str, int] = field(default_factory=dict)
    """Skipped and truncated rows so far, by reason."""


class Reader:
    """Reader of the mixture from a position, one batch after the other.

    Args:
        config: size of a batch.
        sources: rows of each source.
        mixture: order of the rows.
        encode: function that returns the tokens of a row, or None for a skipped one.
        position: start position.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[Rows],
        mixture: Mixture,
        encode: Callable[[Rows, int, Counter[str]], Encoded | None],
        position: Position,
    ) -> None:
        self._config, self._sources, self._mixture, self._encode = config, sources, mixture, encode
        self._draws, self._counters = position.draws, Counter(position.counters)
        self._next: Sample | None = None
        self._left_out = 0

    @property
    def position(self) -> Position:
        """Start of the next batch."""
        return Position(self._draws, dict(self._counters))

    @property
    def exhausted(self) -> bool:
        """Whether no usable row is left. Reads ahead to the next usable row, so that a batch can be marked as the last."""
        return self._peek_sample() is None

    @property
    def epoch(self) -> float:
        """Number of passes over the sources, weighted by their sizes."""
        return self._draws / sum(len(rows) for rows in self._sources)

    def batch(self) -> tuple[Sample, ...]:
        """Return the samples of the next step; empty if the data is exhausted.

        Raises:
            RoleError: a row that must not be skipped is unusable, or a complete pass had no usable row.
        """
        config, samples, tokens = self._config, list[Sample](), 0
        while (following := self._peek_sample()) is not None:
            tokens += len(following)
            full = len(samples) >= config.batch_size if config.batch_tokens is None else tokens > config.batch_tokens
            if samples and full:
                break
            samples.append(following)
            self._next, self._draws = None, self._draws + 1
        return tuple(samples)

    def _peek_sample(self) -> Sample | None:
        while self._next is None:
            if self._mixture.length is not None and self._draws >= self._mixture.length:
                return None
            draw = self._mixture.draw(self._draws)
            rows = self._sources[draw.source]
            encoded = self._encode(rows, draw.row, self._counters)
            if encoded is None:
                self._draws += 1
                self._left_out += 1
                if self._left_out >= sum(len(rows) for rows in self._sources):
                    raise RoleError(f"data.sources: no row is usable: {self._skip_reasons()}", exit_codes.DATA)
                continue
            self._left_out = 0
            self._next = make_sample(
                encoded, source=rows.label, place=rows.describe_place(draw.row), number=self._draws
            )
        return self._next

    def _skip_reasons(self) -> str:
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(self._counters.items()))


def held_out(rows: Rows, encoder: Encoder, *, limit: int) -> tuple[Sample, ...]:
    """Return the validation samples: the first `limit` rows without the skipped ones.

    Raises:
        RoleError: no row is usable.
    """
    counters: Counter[str] = Counter()
    samples = []
    for index in range(min(limit, len(rows))):
        encoded = encoder.encode(rows, index, counters)
        if encoded is not None:
            samples.append(make_sample(encoded, source=rows.label, place=rows.describe_place(index), number=index))
    if not samples:
        raise RoleError(f"data.validation: no row of {rows.label} is usable: {dict(counters)}", exit_codes.DATA)
    return tuple(samples)


def batch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Compute the metrics of a batch: samples, tokens, learned tokens, and the samples per source of a mixture."""
    found: dict[str, float] = {
        "batch/samples": float(len(samples)),
        "batch/tokens": float(sum(len(sample) for sample in samples)),
        "batch/loss_tokens": float(sum(int(sample.loss_mask.sum()) for sample in samples)),
    }
    by_source = Counter(sample.environment for sample in samples)
    if len(by_source) > 1:
        found |= {f"batch/{label}/samples": float(count) for label, count in by_source.items()}
    return found


STATE_FILE = "data.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """State of the pipeline after the batch of a step was made."""

    step: int
    position: Position
    fingerprints: tuple[str, ...]
    """Fingerprints of the sources; a position is valid only for the same data."""


def write_snapshot(checkpoint: Path, snapshot: Snapshot) -> None:
    """Write the pipeline's part of `checkpoint` durably."""
    document = asdict(snapshot) | {"format_version": FORMAT_VERSION}
    state = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    write_json(state, document, before_rename="checkpoint.orchestrator.before_rename")
    reach("checkpoint.orchestrator.written")


def base_position(paths: RunPaths, attempt: Attempt, fingerprints: tuple[str, ...]) -> Position:
    """Return the position in the data at which this attempt starts.

    Raises:
        RoleError: the part is missing or has another format, or the data has changed.
    """
    if attempt.base_attempt is None:
        return Position()
    checkpoint = paths.checkpoint(attempt.base_step, attempt.base_attempt)
    path = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    try:
        document = json.loads(path.read_text())
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError("it has another format")
        position = Position(int(document["position"]["draws"]), dict(document["position"]["counters"]))
        before = tuple(document["fingerprints"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoleError(
            f"cannot resume from {checkpoint}: {path.relative_to(checkpoint)} is unreadable ({error})",
            exit_codes.DATA,
        ) from error
    if before != fingerprints:
        changed = next((i for i, (a, b) in enumerate(zip(before, fingerprints, strict=False)) if a != b), None)
        change = "data.sources has another length" if changed is None else f"data.sources[{changed}] has other files"
        raise RoleError(
            f"cannot resume from {checkpoint}: {change} than when it was saved; restore the data, or start a new run",
            exit_codes.DATA,
        )
    return position
