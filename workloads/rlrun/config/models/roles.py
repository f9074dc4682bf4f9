"""The three roles: the manifest's block of each (`...Spec`), and the resolved configuration that its process gets (`...Config`).

A role's configuration is its block plus the shared values that flow into it. Paths come from `rlrun.protocol.files.paths`, never from here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.division import compile_problem, later_weights_problem
from rlrun.config.formats import RunName, ServerArgument
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.engine_arguments import (
    ENABLE_TOOLS,
    REASONING_PARSER,
    parser_arguments,
    problem_of_arguments,
)
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig, SchedulerConfig
from rlrun.config.models.lora import LoRAConfig
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.parallel import (
    GPU_KERNELS,
    ZERO_BUBBLE,
    ActivationCheckpointing,
    AttentionKernel,
    ComputeDType,
    GradientAccumulation,
    ParallelismConfig,
)
from rlrun.config.models.policies import PoliciesConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig

Task = Literal["RL", "SFT", "Eval"]
TRAINING_TASKS: tuple[Task, ...] = ("RL", "SFT")
ASKING_TASKS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task not in TRAINING_TASKS)
"""Tasks that ask existing policies: they have engines, and no trainer."""
TrajectoryStrategy = Literal["interleaved", "branching"]
MAX_STEPS, SEQ_LEN, SEED = 100, 2048, 0
"""Defaults of the values that all roles share, in a manifest and in a role's own file."""
MICRO_BATCH_TOKENS = 4096
"""Default row of a micro-batch where samples are shorter: smaller ones spend their time on anything but arithmetic."""


def orchestrator_module(task: Task) -> str:
    """Module that the orchestrator's process runs."""
    return "rlrun.orchestrator" if task in TRAINING_TASKS else "rlrun.evaluate"


def micro_batch_tokens(seq_len: int) -> int:
    """Default of `microBatchTokens`, in tokens."""
    return max(seq_len, MICRO_BATCH_TOKENS)


class TrainerSpec(Config):
    """The torchrun group that steps the optimizer (FSDP2)."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Pods of the trainer; on one machine their processes are all started here."""
    processes_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """Ranks per replica; default: one per GPU, or one on CPU."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per replica; 0 trains on CPU."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning rate's schedule."""
    lora: LoRAConfig | None = None
    """Train adapters; default: all weights."""
    shared_with: RunName | None = None
    """Another run (the host) whose trainer and engines this run uses; default: its own. Needs `lora`, of at most the host's rank."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Division of model and data among ranks."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute a layer in backward (`full`; `attention`: all but attention; `selective`: nor matrix products), or fetch it
    from host memory (`offload`); `auto`: the least work that fits the GPU; same result."""
    attention: AttentionKernel = "auto"
    """Kernel: FlashAttention of a package (`fa3`, `fa4`, `flash2`) or of torch (`varlen`), `cudnn`, flex_attention (`flex`), or
    padded blocks (`sdpa`), on CPU too; auto: the fastest that GPU, packages and model allow."""
    compile: bool | None = None
    """Compile every decoder layer (torch.compile); default: on GPUs, where `tp` is 1 and a C++ compiler is there."""
    compute_dtype: ComputeDType = "auto"
    """Number format of forward and backward; auto: bfloat16 on GPUs, float32 on CPU."""
    cpu_offload: bool = False
    """Keep masters, gradients and optimizer state in host memory; needs GPUs."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] | None = None
    """Most tokens per micro-batch; default: `seqLen`, at least 4096. Changes memory and speed, not the result."""
    gradient_accumulation: GradientAccumulation = "reduce"
    """Sum micro-batches' gradients in each rank's shard (`reduce`), or whole on every rank (`local`: less traffic)."""
    updates_per_step: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimizer updates per step, each on its own random part of the batch."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        problem = self.parallelism.problem(self.world_size)
        if problem is not None:
            raise ValueError(problem)
        if (problem := self._memory_problem()) is not None:
            raise ValueError(problem)
        if self.attention in GPU_KERNELS and self.gpus_per_replica == 0:
            raise ValueError(f"attention ({self.attention}) needs GPUs, and gpusPerReplica is 0; set attention: auto")
        if self.lora is not None and self.lora.dropout > 0 and self.parallelism.tp > 1:
            raise ValueError(
                f"parallelism.tp ({self.parallelism.tp}) drops different inputs on each rank; set lora.dropout: 0 or tp: 1"
            )
        if self.shared_with is not None and self.lora is None:
            raise ValueError(
                f"sharedWith ({self.shared_with}) needs lora: runs share a trainer by their adapters; set lora"
            )
        if (
            self.lora is not None
            and self.lora.modules_to_save
            and (self.shared_with is not None or self.lora.slots > 1)
        ):
            raise ValueError(
                "lora.modulesToSave trains whole modules, which runs cannot share; remove it, or sharedWith and lora.slots"
            )
        if self.shared_with is not None and self._says_what_the_host_says():
            raise ValueError(
                f"sharedWith ({self.shared_with}) leaves processes, layout and memory to the host; remove lora.slots, replicas, "
                "processesPerReplica, gpusPerReplica, parallelism, activationCheckpointing, attention, compile, computeDtype, cpuOffload "
                "and gradientAccumulation"
            )
        return self

    @model_validator(mode="after")
    def _fits_stages(self) -> Self:
        pp = self.parallelism.pp
        if self.cpu_offload and pp > 1:
            raise ValueError(
                f"cpuOffload (true) keeps gradients in host memory, where the stages of parallelism.pp ({pp}) do not meet; "
                "set cpuOffload: false or pp: 1"
            )
        if self.lora is not None and self.lora.slots > 1 and pp > 1:
            raise ValueError(
                f"lora.slots ({self.lora.slots}) needs ranks that fail together, which the stages of parallelism.pp ({pp}) do not; "
                "set lora.slots: 1 or pp: 1"
            )
        if self.later_weights and (problem := self._later_weights_problem()) is not None:
            raise ValueError(problem)
        return self

    def _later_weights_problem(self) -> str | None:
        return later_weights_problem(
            self.parallelism.schedule,
            tp=self.parallelism.tp,
            adapters=self.lora is not None,
            compiled=bool(self.compile),
            accumulation=self.gradient_accumulation,
        )

    def _memory_problem(self) -> str | None:
        """Contradiction between the fields that move or shrink what a GPU holds; None: there is none."""
        if self.cpu_offload and self.gpus_per_replica == 0:
            return "cpuOffload (true) needs GPUs, and gpusPerReplica is 0; remove cpuOffload"
        if self.optimizer.offload and self.gpus_per_replica == 0:
            return "optimizer.offload (true) needs GPUs, and gpusPerReplica is 0; remove optimizer.offload"
        if self.optimizer.offload and self.cpu_offload:
            return "optimizer.offload (true) has no meaning with cpuOffload (true), which moves the moments as well; remove one of them"
        if self.optimizer.moments == "int8" and self.parallelism.tp > 1:
            return (
                f"optimizer.moments (int8) keeps blocks of rows, which parallelism.tp ({self.parallelism.tp}) divides; "
                "set moments: float32 or tp: 1"
            )
        return None

    def _says_what_the_host_says(self) -> bool:
        of_host = (
            self.replicas == 1,
            self.processes_per_replica is None,
            self.gpus_per_replica == 0,
            self.parallelism == ParallelismConfig(),
            self.activation_checkpointing == "none",
            self.attention == "auto",
            not self.compile,
            self.compute_dtype == "auto",
            not self.cpu_offload,
            self.gradient_accumulation == "reduce",
            self.lora is None or self.lora.slots == 1,
        )
        return not all(of_host)

    @property
    def compiles(self) -> bool:
        """True if layers are compiled, where the trainer's image has a C++ compiler."""
        if self.compile is not None:
            return self.compile
        problem = compile_problem(self.parallelism.tp, later_weights=self.later_weights)
        return self.gpus_per_replica > 0 and problem is None

    @property
    def later_weights(self) -> bool:
        """True if a pipeline computes the gradients of weights later than those of inputs."""
        return self.parallelism.schedule in ZERO_BUBBLE

    @property
    def ranks_per_replica(self) -> int:
        """Processes that torchrun starts in one replica."""
        return self.processes_per_replica or self.gpus_per_replica or 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole group."""
        return self.replicas * self.ranks_per_replica


class InferenceSpec(Config):
    """The vLLM engines."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Engines, each with a server and the whole model."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per engine, tensorParallel x dataParallel; 0 runs the CPU build of vLLM."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that hold one copy of the model together."""
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of the model in one engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that the engine takes."""
    cpu_kv_cache_gib: Annotated[int, Field(ge=1, le=4096)] = 1
    """Key-value cache of a CPU engine, in whole GiB."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest sequence that the engine takes, in tokens; default: `seqLen`."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 256
    """Most sequences that one engine decodes at the same time."""
    extra_args: list[ServerArgument] = Field(default_factory=list, max_length=64)
    """More arguments for vLLM's server, as on its command line."""

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        needed = self.tensor_parallel * self.data_parallel
        if self.gpus_per_replica not in (0, needed):
            raise ValueError(
                f"gpusPerReplica ({self.gpus_per_replica}) must be tensorParallel x dataParallel ({needed}), or 0 for CPUs"
            )
        return self

    @model_validator(mode="after")
    def _arguments_are_free(self) -> Self:
        if (problem := problem_of_arguments(self.extra_args)) is not None:
            raise ValueError(problem)
        return self

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel * self.data_parallel

    @property
    def parsers(self) -> list[str]:
        """Entries of `extra_args` that configure the parsing of a reply: its calls of tools and its reasoning."""
        return parser_arguments(self.extra_args)


class OrchestratorSpec(Config):
    """The process that makes rollouts, batches and decisions."""

    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Rollouts per step; divisible by every environment's groupSize."""
    max_concurrency: Annotated[int, Field(ge=1, le=65536)] = 512
    """Most rollouts in flight at once."""
    oversampling_factor: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Start this many times the rollouts of a step, train the groups that finish first, and cancel the others."""

    @property
    def surplus(self) -> int:
        """Rollouts that are started beyond those of a step."""
        return round((self.oversampling_factor - 1) * self.batch_size)

    trajectory_strategy: TrajectoryStrategy = "interleaved"
    """Samples of a multi-turn episode: `branching` starts one where the chat template rewrites earlier turns."""
    record_rollouts: bool = False
    """Keep every packed batch for `--replay`; else a kept checkpoint's batches are deleted."""
    keep_traces: Annotated[int, Field(ge=1, le=1_000_000_000)] = 10_000
    """Newest steps whose traces are kept. Of older steps each 100th keeps its trace; those of evaluations are all kept."""
    max_error_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of errors among the last 100 (or batchSize, if larger) rollouts above which the run fails."""


class RoleConfig(Config):
    """Values of the run that every role knows."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """The run's name."""
    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """Unique over all runs that ever had this name; guards against a folder of another run."""
    output_dir: Annotated[str, Field(min_length=1)]
    """The run's folder; every other path follows from it by the file protocol."""
    task: Task = "RL"
    """Reinforcement learning, supervised fine-tuning, or evaluation."""
    model: ModelConfig
    """The policy."""
    max_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps of the whole run."""
    seq_len: Annotated[int, Field(ge=16)]
    """Longest training sample, in tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of everything random."""
    colocated: bool = False
    """Trainer and engines have the same GPUs, in turn."""


class TrainerConfig(TrainerSpec, RoleConfig):
    """The trainer's resolved configuration."""

    algorithm: AlgorithmConfig
    """The objective."""
    environment_algorithms: dict[str, EnvironmentAlgorithm] = Field(default_factory=dict)
    """Parts of the objective that replace the run's for the samples of one environment, by its name."""
    checkpoint: CheckpointConfig
    """When to save and what to keep."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of versions to the engines."""
    engine_urls: Annotated[list[str], Field(max_length=4096)] = Field(default_factory=list)
    """The engines on this machine, with `colocated`: the trainer has the GPUs while they sleep."""
    port: Annotated[int, Field(ge=1, le=65535)] = 29600
    """Port of rank 0's channel to the orchestrator."""
    host: str = "127.0.0.1"
    """Address that the channel binds."""

    @model_validator(mode="after")
    def _environments(self) -> Self:
        for name, own in self.environment_algorithms.items():
            try:
                own.over(self.algorithm)
            except ValueError as error:
                raise ValueError(f"environmentAlgorithms.{name}: {error}") from None
        return self


class InferenceConfig(InferenceSpec, RoleConfig):
    """One engine's resolved configuration."""

    lora: LoRAConfig | None = None
    """The trainer's adapters."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of versions to the engine."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port of the engine's server."""
    host: str = "127.0.0.1"
    """Address that the server binds."""


class OrchestratorConfig(OrchestratorSpec, RoleConfig):
    """The orchestrator's resolved configuration."""

    algorithm: AlgorithmConfig
    """The objective and the staleness bounds."""
    environments: Annotated[list[EnvironmentConfig], Field(max_length=64)]
    """The environments, with their sampling filled in; none in supervised fine-tuning."""
    data: DataConfig | None = None
    """The data of supervised fine-tuning."""
    policies: PoliciesConfig | None = None
    """Policies to evaluate without training; null: the model alone."""
    sampling: SamplingConfig
    """Default sampling."""
    evaluation: EvaluationConfig | None
    """Held-out evaluation."""
    checkpoint: CheckpointConfig
    """When the trainer saves."""
    weight_sync: WeightSyncConfig
    """Deadlines of the weight sync."""
    trainer_url: str = "http://127.0.0.1:29600"
    """Address of rank 0's channel; the host's, with `sharedWith`."""
    shared_with: RunName | None = None
    """The run whose trainer and engines this one uses; default: its own."""
    inference_urls: Annotated[list[str], Field(min_length=1, default_factory=lambda: ["http://127.0.0.1:8000"])]
    """The engines."""
    inference_service: Annotated[str, Field(min_length=1)] | None = None
    """Instead of `inferenceUrls`: one address whose host name stands for all engines, which come and go, such as
    `http://my-run-inference.team-a.svc:8000`. Every address that the name has is an engine."""
    engine_parsers: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """The engines' arguments that say how replies are taken apart; finished rollouts count only under the same ones."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] = 9100
    """Port of the Prometheus metrics."""
    host: str = "127.0.0.1"
    """Address that the metrics bind."""
    replay: str | None = None
    """Folder of recorded batches (`rollouts/` of another run) that are trained on instead of new ones."""

    @property
    def engine_parses_tools(self) -> bool:
        """True if the engines have a parser that finds the calls of tools in replies."""
        return ENABLE_TOOLS in self.engine_parsers

    @property
    def engine_parses_thoughts(self) -> bool:
        """True if the engines have a parser that keeps the thoughts of replies apart."""
        return any(argument.partition("=")[0] == REASONING_PARSER for argument in self.engine_parsers)
