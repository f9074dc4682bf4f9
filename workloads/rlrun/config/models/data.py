"""Data of supervised fine-tuning: data sets of conversations, their mixture, and held-out validation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config, Rule
from rlrun.config.formats import PRINTABLE, Column, FolderPath, HubName, Revision
from rlrun.config.models.language_models import REVISION_RULE

LossRole = Literal["system", "user", "assistant", "tool"]
_ASSISTANT: list[LossRole] = ["assistant"]


class DataSetConfig(Config):
    """One data set. Set exactly one of `path` and `name`."""

    path: FolderPath | None = None
    """A `.jsonl`, `.csv` or `.parquet` file, a folder of such files, or a folder written by `datasets.save_to_disk`."""
    name: HubName | None = None
    """Data set on the hub that consists of such files."""
    revision: Revision | None = None
    """Branch, tag or commit on the hub; default: the main branch."""
    split: Annotated[str, Field(min_length=1, max_length=63), PRINTABLE] | None = None
    """Read only files and folders whose name contains this text."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        REVISION_RULE,
        Rule(
            "has(self.path) != has(self.name)",
            "set exactly one of path and name; got {has(self.path) ? 'both' : 'neither'}",
        ),
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.name is None):
            got = "neither" if self.path is None else "both"
            raise ValueError(f"set exactly one of path and name; got {got}")
        if self.revision is not None and self.name is None:
            raise ValueError(f"revision ({self.revision}) needs name: a local folder has no revisions; remove revision")
        return self

    @property
    def label(self) -> str:
        """Name of the data set in messages and metrics, with the split in parentheses."""
        return (self.path or self.name or "") + (f" ({self.split})" if self.split else "")


class SourceConfig(DataSetConfig):
    """One data set of the mixture."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the sampled rows, relative to the other sources' weights."""


class ValidationConfig(DataSetConfig):
    """Held-out rows. Their loss is measured before the first step, every `interval` steps and after the last step."""

    interval: Annotated[int, Field(ge=1)] = 50
    """Steps between two measurements."""
    max_samples: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Most rows to read, from the first row on."""


class DataConfig(Config):
    """Rows to train on: conversations (`messages`, in OpenAI's format), or prompts with completions."""

    sources: Annotated[list[SourceConfig], Field(min_length=1, max_length=64)]
    """Data sets of the mixture."""
    messages_field: Column = "messages"
    """Column of the conversation."""
    prompt_field: Column = "prompt"
    """Column of the prompt, for rows without a conversation."""
    completion_field: Column = "completion"
    """Column of the completion, for rows without a conversation. Only the completion is trained on."""
    tools_field: Column = "tools"
    """Column of the conversation's tool definitions (optional)."""
    loss_roles: Annotated[list[LossRole], Field(min_length=1, max_length=4)] = _ASSISTANT
    """Roles whose messages are trained on. A message's own `weight` (default 1) scales the loss of its tokens."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Rows per step."""
    batch_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens per step; used instead of `batchSize`."""
    shuffle: bool = True
    """Shuffle the rows in each epoch. Off: the order of the files."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Passes over the data. The run ends after them, or at `maxSteps` if that comes first."""
    stopping: Literal["FirstExhausted", "AllExhausted"] | None = None
    """End of an epoch: when the first source is exhausted (default), or when all are."""
    too_long: Literal["Truncate", "Skip", "Fail"] = "Truncate"
    """Rows longer than `seqLen` tokens: truncate them, skip them, or fail."""
    malformed: Literal["Fail", "Skip"] = "Fail"
    """Rows that are not valid conversations: fail, or skip them."""
    validation: ValidationConfig | None = None
    """Held-out validation. Default: no validation."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.stopping) || has(self.epochs)",
            "stopping ({self.stopping}) needs epochs; set epochs or remove stopping",
            ".stopping",
        ),
    )

    @model_validator(mode="after")
    def _stopping_stops(self) -> Self:
        if self.stopping is not None and self.epochs is None:
            raise ValueError(f"stopping ({self.stopping}) needs epochs; set epochs or remove stopping")
        return self
