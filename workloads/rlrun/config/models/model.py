"""Language model that a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import EnvironmentId, FolderPath, HubName, Revision
from rlrun.config.rule import Rule

DType = Literal["float32", "bfloat16", "float16"]


class TinyModelConfig(Config):
    """A Hugging Face Llama of about a million parameters with a character tokenizer, created by RLRun; for tests and first steps."""

    hidden_size: Annotated[int, Field(ge=16, le=1024, multiple_of=8)] = 128
    """Width of the residual stream, in units."""
    layers: Annotated[int, Field(ge=1, le=32)] = 4
    """Number of decoder layers."""
    max_length: Annotated[int, Field(ge=32, le=32768)] = 2048
    """Longest sequence that the model's positions allow, in tokens."""
    warmup_environment: EnvironmentId | None = None
    """Environment whose demonstrations the model is trained on first. Default: random weights."""
    warmup_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Arguments of the warm-up environment."""
    warmup_steps: Annotated[int, Field(ge=0, le=10000)] = 60
    """Most supervised steps, of 64 demonstrations each. RL needs a model that succeeds sometimes, but not always."""
    warmup_accuracy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Mean probability of the demonstrations' tokens at which the warm-up stops early. Default: all `warmupSteps`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights and of the order of demonstrations."""


REVISION_RULE = Rule(
    "!has(self.revision) || has(self.name)",
    "revision ({self.revision}) needs name: a local folder has no revisions; remove revision",
    ".revision",
)


class ModelConfig(Config):
    """The policy's initial weights. Set exactly one of `name`, `path` and `tiny`."""

    name: HubName | None = None
    """Repository on the model hub, such as `Qwen/Qwen3-8B`."""
    path: FolderPath | None = None
    """Folder with a Hugging Face model: `config.json`, safetensors, tokenizer."""
    tiny: TinyModelConfig | None = None
    """Create a tiny model in the run's folder before the first attempt."""
    revision: Revision | None = None
    """Branch, tag or commit on the hub; only with `name`. Default: the repository's main branch."""
    dtype: DType = "bfloat16"
    """Number format of published weights and of the engine. The trainer keeps float32 master weights."""
    trust_remote_code: bool = False
    """Run Python code of the model's repository. Enable it only for repositories that you have reviewed."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.name), has(self.path), has(self.tiny)].filter(given, given).size() == 1",
            "set exactly one of name, path and tiny; got "
            "{!has(self.name) && !has(self.path) && !has(self.tiny) ? 'none of them' : "
            "has(self.name) && has(self.path) ? 'name and path' : has(self.name) ? 'name and tiny' : 'path and tiny'}",
        ),
        REVISION_RULE,
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("name", "path", "tiny") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none of them"
            raise ValueError(f"set exactly one of name, path and tiny; got {got}")
        if self.revision is not None and self.name is None:
            raise ValueError(f"revision ({self.revision}) needs name: a local folder has no revisions; remove revision")
        return self

    def source(self, made: Path) -> str:
        """Return the argument for `transformers` and vLLM: the hub name, the folder, or `made`, the folder of the tiny model."""
        if self.tiny is not None:
            return str(made)
        return self.path or self.name or ""
