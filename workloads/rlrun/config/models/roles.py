"""The three roles: the manifest's block of each role (`...Spec`) and the resolved configuration of its process (`...Config`).

A role's configuration is its block plus the shared values. Paths come from `rlrun.protocol.files.paths`, not from this module.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import RunName, ServerArgument
from rlrun.config.layout_rules import compile_problem, later_weights_problem
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.engine_arguments import (
    ENABLE_TOOLS,
    REASONING_PARSER,
    parser_arguments,
    problem_of_arguments,
)
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.language_models import LoRAConfig, ModelConfig, PoliciesConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig, SchedulerConfig
from rlrun.config.models.parallel import (
    GPU_KERNELS,
    ZERO_BUBBLE,
    ActivationCheckpointing,
    AttentionKernel,
    ComputeDType,
    GradientAccumulation,
    ParallelismConfig,
    RouterConfig,
)
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig

Task = Literal["RL", "SFT", "Eval"]
TRAINING_TASKS: tuple[Task, ...] = ("RL", "SFT")
ASKING_TASKS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task not in TRAINING_TASKS)
"""Tasks that evaluate existing policies. They have engines, but no trainer."""
TrajectoryStrategy = Literal["interleaved", "branching"]
MAX_STEPS, SEQ_LEN, SEED = 100, 2048, 0
"""Defaults of the values that all roles share, in a manifest and in a role's own file."""
MICRO_BATCH_TOKENS = 4096
"""Default size of a micro-batch for short samples, in tokens; smaller micro-batches spend most of their time outside arithmetic."""


def orchestrator_module(task: Task) -> str:
    """Return the module that the orchestrator's process runs."""
    return "rlrun.orchestrator" if task in TRAINING_TASKS else "rlrun.evaluate"


def micro_batch_tokens(seq_len: int) -> int:
    """Return the default of `microBatchTokens`, in tokens."""
    return max(seq_len, MICRO_BATCH_TOKENS)


class TrainerSpec(Config):
    """The trainer: a torchrun group that runs the optimizer (FSDP2)."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Pods of the trainer. On one machine, all their processes run on that machine."""
    processes_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """Ranks per replica. Default: one per GPU, or one on CPU."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per replica; 0: train on CPU."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning rate's schedule."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters. Default: train all weights."""
    shared_with: RunName | None = None
    """Another run (the host) whose trainer and engines this run uses. Needs `lora` with at most the host's rank. Default: its own."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Division of model and data among ranks."""
    activation_checkpointing: ActivationCheckpointing = "auto"
    """Recompute a layer in the backward pass (`full`; `attention`: except attention; `selective`: also except matrix products), or load
    it from host memory (`offload`). `auto`: the least work that fits the GPU; on a CPU `none`. The result is the same."""
    attention: AttentionKernel = "auto"
    """Kernel: FlashAttention from a package (`fa3`, `fa4`, `flash2`) or from torch (`varlen`), `cudnn`, flex_attention (`flex`), or
    padded blocks (`sdpa`, also on CPU). auto: the fastest that GPU, packages and model allow."""
    compile: bool | None = None
    """Compile every decoder layer (torch.compile). Default: on GPUs, if `tp` is 1 and the image has a C++ compiler."""
    compute_dtype: ComputeDType = "auto"
    """Number format of the forward and backward passes. auto: bfloat16 on GPUs, float32 on CPU."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory; needs GPUs."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] | None = None
    """Most tokens per micro-batch. Default: `seqLen`, at least 4096. Changes memory and speed, but not the result."""
    gradient_accumulation: GradientAccumulation = "reduce"
    """`reduce`: sum the gradients of micro-batches in each rank's shard. `local`: in full on every rank, with less traffic."""
    updates_per_step: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimizer updates per step. Each uses its own random part of the batch."""
    epochs_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes over the samples of a step, each with `updatesPerStep` updates of a new random division. Proximal and reference log-probs,
    values and advantages are those from before the first update."""
    router: RouterConfig = RouterConfig()
    """Routers of a mixture of experts."""

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        problem = self.parallelism.layout_problem(self.world_size)
        if problem is not None:
            raise ValueError(problem)
        if (problem := self._memory_problem()) is not None:
            raise ValueError(problem)
        if self.attention in GPU_KERNELS and self.gpus_per_replica == 0:
            raise ValueError(f"attention ({self.attention}) needs GPUs, but gpusPerReplica is 0; set attention: auto")
        if self.lora is not None and self.lora.dropout > 0 and self.parallelism.tp > 1:
            raise ValueError(
                f"lora.dropout ({self.lora.dropout}) would drop different inputs on each rank of parallelism.tp ({self.parallelism.tp}); "
                "set lora.dropout: 0 or tp: 1"
            )
        if self.shared_with is not None and self.lora is None:
            raise ValueError(
                f"sharedWith ({self.shared_with}) needs lora, because runs share a trainer only with adapters; set lora"
            )
        if (
            self.lora is not None
            and self.lora.modules_to_save
            and (self.shared_with is not None or self.lora.slots > 1)
        ):
            raise ValueError(
                "lora.modulesToSave trains full modules, which runs cannot share; remove it, or remove sharedWith and lora.slots"
            )
        if self.shared_with is not None and self._says_what_the_host_says():
            raise ValueError(
                f"sharedWith ({self.shared_with}) uses the host's processes, layout and memory; remove lora.slots, replicas, "
                "processesPerReplica, gpusPerReplica, parallelism, activationCheckpointing, attention, compile, computeDtype, cpuOffload "
                "and gradientAccumulation"
            )
        return self

    @model_validator(mode="after")
    def _fits_stages(self) -> Self:
        pp = self.parallelism.pp
        if self.cpu_offload and pp > 1:
            raise ValueError(
                f"cpuOffload (true) keeps gradients in host memory, which the stages of parallelism.pp ({pp}) cannot share; "
                "set cpuOffload: false or pp: 1"
            )
        if self.lora is not None and self.lora.slots > 1 and pp > 1:
            raise ValueError(
                f"lora.slots ({self.lora.slots}) needs ranks that fail together, but the stages of parallelism.pp ({pp}) do not; "
                "set lora.slots: 1 or pp: 1"
            )
        if self.later_weights and (problem := self._later_weights_problem()) is not None:
            raise ValueError(problem)
        slots = 1 if self.lora is None else self.lora.slots
        problem = self.router.replay_problem(
            pp=self.parallelism.pp,
            updates=self.updates_per_step,
            epochs=self.epochs_per_step,
            shared_with=self.shared_with,
            slots=slots,
        )
        problem = problem or self.router.balance_problem(self.parallelism, with_lora=self.lora is not None)
        if problem is not None:
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
        if self.cpu_offload and self.gpus_per_replica == 0:
            return "cpuOffload (true) needs GPUs, but gpusPerReplica is 0; remove cpuOffload"
        if self.optimizer.offload and self.gpus_per_replica == 0:
            return "optimizer.offload (true) needs GPUs, but gpusPerReplica is 0; remove optimizer.offload"
        if self.optimizer.offload and self.cpu_offload:
            return "optimizer.offload (true) has no effect with cpuOffload (true), which moves the moments as well; remove one of them"
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
            self.activation_checkpointing
            in ("auto", "none"),  # `none` was the default and is still in written manifests
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
        """Whether layers are compiled if the trainer's image has a C++ compiler."""
        if self.compile is not None:
            return self.compile
        problem = compile_problem(self.parallelism.tp, later_weights=self.later_weights)
        return self.gpus_per_replica > 0 and problem is None

    @property
    def later_weights(self) -> bool:
        """Whether a pipeline computes gradients of weights later than gradients of inputs."""
        return self.parallelism.schedule in ZERO_BUBBLE

    @property
    def ranks_per_replica(self) -> int:
        """Processes that torchrun starts in one replica."""
        return self.processes_per_replica or self.gpus_per_replica or 1

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.replicas * self.ranks_per_replica


class InferenceSpec(Config):
    """The vLLM engines."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of engines. Each has one server and the full model."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per engine, tensorParallel x dataParallel; 0: the CPU build of vLLM."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share one copy of the model."""
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of the model in one engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that the engine uses."""
    cpu_kv_cache_gib: Annotated[int, Field(ge=1, le=4096)] = 1
    """Key-value cache of a CPU engine, in whole GiB."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest sequence of the engine, in tokens. Default: `seqLen`."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 256
    """Most sequences that one engine decodes at once."""
    extra_args: list[ServerArgument] = Field(default_factory=list, max_length=64)
    """Additional arguments of vLLM's server, as on its command line."""

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
    def parser_entries(self) -> list[str]:
        """Entries of `extra_args` that configure how a reply is parsed: its tool calls and its reasoning."""
        return parser_arguments(self.extra_args)


class OrchestratorSpec(Config):
    """The process that schedules rollouts, builds batches and controls the run."""

    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Rollouts per step. Must be divisible by every environment's groupSize."""
    max_concurrency: Annotated[int, Field(ge=1, le=65536)] = 512
    """Most rollouts that run at once."""
    oversampling_factor: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Start this many times the rollouts of a step, train on the groups that finish first, and cancel the others."""

    @property
    def surplus(self) -> int:
        """Rollouts that are started in addition to those of a step."""
        return round((self.oversampling_factor - 1) * self.batch_size)

    trajectory_strategy: TrajectoryStrategy = "interleaved"
    """Samples of a multi-turn episode. `branching` starts a new sample when the chat template rewrites earlier turns."""
    record_rollouts: bool = False
    """Keep every packed batch for `--replay`. Off: a batch is deleted once its checkpoint is saved."""
    keep_traces: Annotated[int, Field(ge=1, le=1_000_000_000)] = 10_000
    """Number of newest steps whose traces are kept. Every 100th older step keeps its trace. Traces of evaluations are never deleted."""
    max_error_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of errors in the last 100 rollouts (batchSize, if larger) above which the run fails."""


class RoleConfig(Config):
    """Values of the run that every role needs."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """The run's name."""
    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """Unique over all runs that ever had this name. It prevents the use of another run's folder."""
    output_dir: Annotated[str, Field(min_length=1)]
    """The run's folder. The file protocol derives every other path from it."""
    task: Task = "RL"
    """Reinforcement learning, supervised fine-tuning, or evaluation."""
    model: ModelConfig
    """The policy."""
    max_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps of the run."""
    seq_len: Annotated[int, Field(ge=16)]
    """Longest training sample, in tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of all random number generators."""
    colocated: bool = False
    """Trainer and engines use the same GPUs in turn."""


class TrainerConfig(TrainerSpec, RoleConfig):
    """The trainer's resolved configuration."""

    algorithm: AlgorithmConfig
    """The objective."""
    environment_algorithms: dict[str, EnvironmentAlgorithm] = Field(default_factory=dict)
    """Parts of the objective that replace the run's for the samples of one environment, by the environment's name."""
    checkpoint: CheckpointConfig
    """Intervals and retention of checkpoints."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of weights to the engines."""
    engine_urls: Annotated[list[str], Field(max_length=4096)] = Field(default_factory=list)
    """Addresses of the engines on this machine, with `colocated`: the trainer uses the GPUs while they sleep."""
    port: Annotated[int, Field(ge=1, le=65535)] = 29600
    """Port of the channel between rank 0 and the orchestrator."""
    host: str = "127.0.0.1"
    """Address that the channel binds to."""

    @model_validator(mode="after")
    def _check_environment_algorithms(self) -> Self:
        for name, own in self.environment_algorithms.items():
            try:
                own.merged_over(self.algorithm)
            except ValueError as error:
                raise ValueError(f"environmentAlgorithms.{name}: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        proximal = self.algorithm.effective_proximal
        if self.router.replay == "Rollout" and self.task == "SFT":
            raise ValueError(
                "router.replay (Rollout) needs tokens that an engine sampled, but task is SFT; set router.replay: Off"
            )
        if self.router.replay == "Step" and proximal != "recompute":
            raise ValueError(
                f"router.replay (Step) needs the pass of algorithm.proximal: recompute, but proximal is {proximal}; "
                "set algorithm.proximal: recompute or router.replay: Off"
            )
        return self


class InferenceConfig(InferenceSpec, RoleConfig):
    """One engine's resolved configuration."""

    lora: LoRAConfig | None = None
    """Adapters of the trainer."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of weights to the engine."""
    return_routes: bool = False
    """Return the experts of each token, for `trainer.router.replay: Rollout`."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port of the engine's server."""
    host: str = "127.0.0.1"
    """Address that the server binds to."""


class OrchestratorConfig(OrchestratorSpec, RoleConfig):
    """The orchestrator's resolved configuration."""

    algorithm: AlgorithmConfig
    """The objective and the staleness bounds."""
    environments: Annotated[list[EnvironmentConfig], Field(max_length=64)]
    """Environments with complete sampling; empty for supervised fine-tuning."""
    data: DataConfig | None = None
    """Data of supervised fine-tuning."""
    policies: PoliciesConfig | None = None
    """Policies to evaluate without training; null: only the model."""
    sampling: SamplingConfig
    """Default sampling."""
    evaluation: EvaluationConfig | None
    """Held-out evaluation."""
    checkpoint: CheckpointConfig
    """Intervals of the trainer's checkpoints."""
    weight_sync: WeightSyncConfig
    """Deadlines of the weight sync."""
    trainer_url: str = "http://127.0.0.1:29600"
    """Address of rank 0's channel; the host's, with `sharedWith`."""
    shared_with: RunName | None = None
    """Run whose trainer and engines this run uses. Default: its own."""
    replay_routes: bool = False
    """Request the experts of each token from the engines, for `trainer.router.replay: Rollout`."""
    inference_urls: Annotated[list[str], Field(min_length=1, default_factory=lambda: ["http://127.0.0.1:8000"])]
    """Addresses of the engines."""
    inference_service: Annotated[str, Field(min_length=1)] | None = None
    """Address whose host name resolves to all engines, such as `http://my-run-inference.team-a.svc:8000`, used instead of
    `inferenceUrls`. Every IP address of the name is an engine; engines may come and go."""
    engine_parsers: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """Engine arguments that configure how replies are parsed. Only rollouts with the same arguments are reused."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] = 9100
    """Port of the Prometheus metrics."""
    host: str = "127.0.0.1"
    """Address that the metrics server binds to."""
    replay: str | None = None
    """Folder of recorded batches (`rollouts/` of another run) to train on instead of new ones."""

    @property
    def engine_parses_tools(self) -> bool:
        """Whether the engines parse tool calls in replies."""
        return ENABLE_TOOLS in self.engine_parsers

    @property
    def engine_parses_thoughts(self) -> bool:
        """Whether the engines separate reasoning from answers."""
        return any(argument.partition("=")[0] == REASONING_PARSER for argument in self.engine_parsers)
