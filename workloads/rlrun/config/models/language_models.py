"""Configuration of a run's language models.

In the order of the file: the policy's initial weights; models that the trainer holds in addition to the policy, which are a frozen
reference (or teacher) and a trained critic; low-rank adapters (LoRA), which are trained instead of all weights; policies that an evaluation
run without training evaluates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config, Rule
from rlrun.config.formats import (
    ClassPath,
    EnvironmentId,
    FolderPath,
    HubName,
    ModelSource,
    ModulePattern,
    Revision,
    RunFolder,
)

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
    class_: Annotated[ClassPath | None, Field(alias="class")] = None
    """Your own class, `package.module:Class`, a `transformers.PreTrainedModel` with a `config_class`; installed in the images. Default:
    the class that transformers selects."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.name), has(self.path), has(self.tiny)].filter(given, given).size() == 1",
            "set exactly one of name, path and tiny; got "
            "{!has(self.name) && !has(self.path) && !has(self.tiny) ? 'none of them' : "
            "has(self.name) && has(self.path) ? 'name and path' : has(self.name) ? 'name and tiny' : 'path and tiny'}",
        ),
        REVISION_RULE,
        Rule(
            "!has(self.class) || !has(self.tiny)",
            "class ({self.class}) needs name or path: a tiny model has its own class; remove class",
        ),
        Rule(
            "!has(self.class) || !self.trustRemoteCode",
            "class ({self.class}) replaces the code of the model's repository; remove class or trustRemoteCode",
        ),
    )

    @model_validator(mode="after")
    def _class_of_files(self) -> Self:
        if self.class_ is not None and self.tiny is not None:
            raise ValueError(f"class ({self.class_}) needs name or path: a tiny model has its own class; remove class")
        if self.class_ is not None and self.trust_remote_code:
            raise ValueError(
                f"class ({self.class_}) replaces the code of the model's repository; remove class or trustRemoteCode"
            )
        return self

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


INITIAL = "initial"
"""Value of `model` for the model that the run starts from."""

REPOSITORY_MAX = 253
"""Longest name of a hub repository, in characters, as for `model.name`. A folder's path may be longer."""


class ReferenceConfig(Config):
    """A frozen model whose log-probs a KL term or distillation reads: the run's initial model, or a teacher."""

    model: ModelSource = INITIAL
    """`initial`: the model that the run starts from. Otherwise an absolute folder or a hub repository with the same vocabulary."""
    revision: Revision | None = None
    """Branch, tag or commit on the hub; default: the main branch."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.revision) || !(self.model == 'initial' || self.model.startsWith('/'))",
            "revision ({self.revision}) needs a hub repository, but model is {self.model}; remove revision",
            ".revision",
        ),
    )

    @model_validator(mode="after")
    def _name_of_a_repository(self) -> Self:
        if not self.model.startswith("/") and len(self.model) > REPOSITORY_MAX:
            has = f"model ({self.model[:40]}…) has {len(self.model)} characters"
            raise ValueError(
                f"{has}, but a hub repository has at most {REPOSITORY_MAX}; use a shorter name or an absolute folder"
            )
        return self

    @model_validator(mode="after")
    def _revision_of_a_repository(self) -> Self:
        if self.revision is not None and (self.model == INITIAL or self.model.startswith("/")):
            raise ValueError(
                f"revision ({self.revision}) needs a hub repository, but model is {self.model}; remove revision"
            )
        return self

    def resolve_model(self, policy: ModelConfig) -> ModelConfig:
        """Return the source of the reference model; `policy` is the run's model."""
        if self.model == INITIAL:
            return policy
        if self.model.startswith("/"):
            return ModelConfig(path=self.model)
        return ModelConfig(name=self.model, revision=self.revision)


class CriticConfig(Config):
    """A value model for advantage `gae`: a copy of the policy with a value head, trained by the same ranks."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Peak learning rate. All other settings come from `trainer.optimizer` and `trainer.scheduler`."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Largest distance of a new value from the value at the start of the step; null: unlimited."""


class LoRAConfig(Config):
    """Train low-rank adapters (Hu et al., 2021); the model's own weights do not change."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank r of the update (alpha / r) B A of each weight matrix."""
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """Numerator of the update's scale, alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is zeroed in training."""
    targets: Annotated[list[ModulePattern], Field(max_length=64)] = Field(default_factory=list)
    """Linear layers with an adapter, by the end of their names (`q_proj`, `mlp.up_proj`); `*` is allowed. Default: attention and MLP."""
    modules_to_save: Annotated[list[ModulePattern], Field(max_length=64)] = Field(default_factory=list)
    """Modules trained in full, such as `lm_head`. Merged weights are published then, because vLLM cannot load such adapters."""

    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of runs whose adapters the trainer holds, including this run. Above 1, other runs may share it (`sharedWith`)."""

    @property
    def served_as_adapter(self) -> bool:
        """Whether the engine receives only the adapter. Otherwise it receives all weights, with the update merged."""
        return not self.modules_to_save


class PoliciesConfig(Config):
    """Policies of another run. Without `steps` and `base`: the base model and every available step."""

    from_run: RunFolder
    """A run by name, on the same volume, or a folder: of a run, or of policies (`step_10`, `checkpoint-10`)."""
    steps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=256)] | None = None
    """Steps to evaluate. Default: every available step."""
    base: bool = False
    """Evaluate the base model, in addition to `steps` or without steps."""
