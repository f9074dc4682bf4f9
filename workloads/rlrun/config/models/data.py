"""Data of supervised fine-tuning: data sets of conversations, their mixture, and held-out validation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import PRINTABLE, Column, FolderPath, HubName, Revision
from rlrun.config.models.model import REVISION_RULE
from rlrun.config.rule import Rule

LossRole = Literal["system", "user", "assistant", "tool"]
_ASSISTANT: list[LossRole] = ["assistant"]


class DataSetConfig(Config):
    """One data set. Exactly one of `path` and `name` says where it is."""

    path: FolderPath | None = None
    """A `.jsonl`, `.csv` or `.parquet` file, or a folder of them or as `datasets` saves it."""
    name: HubName | None = None
    """Data set on the hub with such files."""
    revision: Revision | None = None
    """Branch, tag or commit on the hub; default: the main branch."""
    split: Annotated[str, Field(min_length=1, max_length=63), PRINTABLE] | None = None
    """Only files and folders with this in their name."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        REVISION_RULE,
        Rule(
            "has(self.path) != has(self.name)",
            "exactly one of path and name says where the data is; got {has(self.path) ? 'both' : 'neither'}",
        ),
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.name is None):
            got = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of path and name says where the data is; got {got}")
        if self.revision is not None and self.name is None:
            raise ValueError(f"revision ({self.revision}) needs name: a local folder has no revisions; remove revision")
        return self

    @property
    def label(self) -> str:
        """Name of the data set in messages and metrics."""
        return (self.path or self.name or "") + (f" ({self.split})" if self.split else "")


class SourceConfig(DataSetConfig):
    """One data set of the mixture."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of rows among the sources."""


class ValidationConfig(DataSetConfig):
    """Rows whose loss is measured before the first step, every `interval` steps and after the last."""

    interval: Annotated[int, Field(ge=1)] = 50
    """Steps between two measurements."""
    max_samples: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Rows, from the first on."""


class DataConfig(Config):
    """The rows of a run: chats (`messages`, in OpenAI's form), or a prompt and its completion."""

    sources: Annotated[list[SourceConfig], Field(min_length=1, max_length=64)]
    """The mixture."""
    messages_field: Column = "messages"
    """Column of the chat."""
    prompt_field: Column = "prompt"
    """Column of the prompt, where there is no chat."""
    completion_field: Column = "completion"
    """Column of the completion, which alone is learned then."""
    tools_field: Column = "tools"
    """Column of the tools of the chat, if any."""
    loss_roles: Annotated[list[LossRole], Field(min_length=1, max_length=4)] = _ASSISTANT
    """Roles that are learned. A message's own `weight` (default 1) weighs its tokens."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Rows per step."""
    batch_tokens: Annotated[int, Field(ge=16)] | None = None
    """Instead of `batchSize`: rows of this many tokens per step."""
    shuffle: bool = True
    """A new order in each epoch; otherwise that of the files."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Passes over the data; the run ends after them or at `maxSteps`."""
    stopping: Literal["FirstExhausted", "AllExhausted"] | None = None
    """End of `epochs`: with the first source (default) or with all."""
    too_long: Literal["Truncate", "Skip", "Fail"] = "Truncate"
    """Rows of more than `seqLen` tokens: cut, left out, or an error."""
    malformed: Literal["Fail", "Skip"] = "Fail"
    """Rows that are no chat: an error, or left out."""
    validation: ValidationConfig | None = None
    """Held-out loss; none by default."""

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
