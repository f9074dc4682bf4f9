"""`--bench`: measure MFU, tokens/s, step time and peak memory of the training step, without an orchestrator and without files.

The policy, its reference and its critic have the run's architectures and random weights; the data is random, one sequence of the measured
length per sample. A step is one update with all forward and backward passes that the objective needs.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlrun.algorithms import Mixture
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.runtime import exit_codes
from rlrun.trainer.garbage import Garbage
from rlrun.trainer.learning.critic import critic_around, to_critic
from rlrun.trainer.learning.learner import Learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.reference_model import FrozenReference, freeze_reference
from rlrun.trainer.learning.run_objective import Update, bind_objective
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.attention.select import needs_of, select_kernel
from rlrun.trainer.modeling.flops import Cost, model_cost, peak_flops
from rlrun.trainer.modeling.packed_attention import kernel_of, set_kernel
from rlrun.trainer.modeling.recurrent import set_packing
from rlrun.trainer.modeling.shard import Memory, load_model, shard_model
from rlrun.trainer.proof.architecture_check import examine_model
from rlrun.trainer.proof.start_check import check_stages
from rlrun.trainer.ranks.group import Group, process_group
from rlrun.trainer.ranks.launch import BenchOptions


@dataclass(frozen=True)
class Measurement:
    """One row of the table; lists contain one value per step."""

    seq_len: int
    tokens: int
    """Tokens of one step over all ranks."""
    seconds: list[float]
    mfu: list[float] | None
    """Model FLOPs utilization: share of the devices' peak, from 0 to 1, or None if the peak is unknown."""
    peak_memory: float
    """Bytes, maximum over ranks: allocated memory on CUDA, resident memory on CPU."""
    graphs: int = 0
    """Graphs compiled before the first measured step, including earlier lengths; 0 without `compile`."""
    late_graphs: int = 0
    """Graphs compiled during the measured steps; if greater than 0, the times include compilation."""


@dataclass(frozen=True)
class Bench:
    """Learner with random weights, and its fake batches."""

    config: TrainerConfig
    group: Group
    learner: Learner
    cost: Cost
    vocabulary: int

    def update(self, length: int, rows: int) -> Update:
        """Return this rank's part of a batch with `rows` sequences of `length` tokens per rank."""
        batch = fake_batch(length, rows * self.group.data_size, self.vocabulary)
        # A row has one sequence of `length` tokens, as every packing allows.
        planned = plan_micro_batches([length] * len(batch.samples), row_tokens=length, ranks=self.group.data_size)
        return Update(batch, planned.ranks[self.group.data_rank])

    def step(self, update: Update) -> float:
        """Run one step and return its duration in seconds, including all queued device work."""
        began = _device_time(self.group.device)
        rate = self.config.optimizer.lr
        self.learner.step([update], lr=rate, critic_lr=rate)
        return _device_time(self.group.device) - began

    def measure(self, length: int, options: BenchOptions) -> Measurement:
        """Run the warm-up steps, then measure the steps of one sequence length."""
        update = self.update(length, options.rows)
        _reset_peak(self.group.device)
        garbage = Garbage()
        for _ in range(options.warmup):
            self.step(update)
            garbage.after_step()
        before = graphs_compiled()
        seconds = [self.step(update) for _ in range(options.steps)]
        late = graphs_compiled() - before
        return _make_measurement(length, update.batch, seconds, self.cost, self.group, graphs=before, late_graphs=late)

    @property
    def table_title(self) -> str:
        """Heading of the table: devices, model, optimizer, kernels and torch version."""
        config, device, model = self.config, self.group.device, self.learner.model
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        beside = [word for word in ("reference", "critic") if getattr(config.algorithm, word) is not None]
        parts = [f"{self.group.world_size} x {name}", f"{millions:.1f} M parameters", config.optimizer.name, *beside]
        parts += [
            f"attention {kernel_of(model)}",
            f"activations {config.activation_checkpointing}",
        ]
        return ", ".join([*parts, *(["compiled"] if config.compiles else []), f"torch {torch.__version__}"])


@contextmanager
def prepare_bench(config: TrainerConfig, *, longest: int) -> Iterator[Bench]:
    """Create a bench for sequences of at most `longest` tokens; all ranks call it together.

    Raises:
        RoleError: the model's configuration cannot be loaded, or `longest` exceeds its positions.
    """
    loss = bind_objective(config)
    with process_group(config.gpus_per_replica, config.parallelism) as group, tempfile.TemporaryDirectory() as made:
        source = _model_source(config, Path(made), group)
        model = _random_model(config, config.model, source, group)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise RoleError(
                f"--bench.seq-lens {longest} is more than the model's {positions} positions; lower it",
                exit_codes.CONFIGURATION,
            )
        cost = model_cost(model)
        if config.lora is not None:
            lora.inject_adapters(model, config.lora)
        shard_model(model, group, memory=Memory.from_config(config))
        lora.initialize_adapters(model, config.seed)
        learner = _make_learner_of_bench(config, model, loss, source, group)
        group.barrier()  # keep rank 0's temporary folder until all ranks have read it
        yield Bench(config, group, learner, cost, model.config.get_text_config().vocab_size)


def run_bench(config: TrainerConfig, options: BenchOptions) -> int:
    """Measure all lengths, print the table and return exit code 0; all ranks call it together.

    Raises:
        RoleError: see `prepare_bench`.
    """
    lengths = sorted(options.seq_lens or (config.seq_len,))
    with prepare_bench(config, longest=lengths[-1]) as made:
        found = [made.measure(length, options) for length in lengths]
        if made.group.leads:
            print(markdown_table(found, made.table_title), flush=True)
            if options.output is not None:
                document = {"title": made.table_title, "measurements": [asdict(one) for one in found]}
                Path(options.output).write_text(json.dumps(document, indent=1))
    return exit_codes.OK


def graphs_compiled() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported by the first compiled call, which takes seconds
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def fake_batch(length: int, sequences: int, vocabulary: int) -> Batch:
    """Create random sequences of one length; the loss mask contains every token except the first."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) > 0
    samples = [
        Sample(
            input_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -math.log(vocabulary), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            temperature=1.0,
            environment="bench",
            task_id=str(index),
            group=index,
            rollout=0,
            dispatch_version=0,
            reward=0.0,
        )
        for index in range(sequences)
    ]
    return Batch(1, 1, tuple(samples))


def _model_source(config: TrainerConfig, made: Path, group: Group) -> str:
    """Return the folder or repository of the model's configuration; `made` is a temporary folder of this rank."""
    if config.model.tiny is None:
        return config.model.source(made)
    if group.leads:
        from rlrun.trainer.modeling.tiny_model import make_tiny_model

        make_tiny_model(made / "tiny", config.model.tiny.model_copy(update={"warmup_environment": None}))
    found: str = group.broadcast(str(made / "tiny"))
    return found


def _random_model(config: TrainerConfig, chosen: ModelConfig, source: str, group: Group) -> Any:
    """Create the architecture with identical random weights on every rank, and the attention kernel of a real run."""
    torch.manual_seed(config.seed)
    model: Any = load_model(chosen, source, with_weights=False)
    verdict = examine_model(model, seq_len=config.seq_len)
    features = verdict.features
    set_packing(model, verdict.packing)
    check_stages(model, group, seq_len=config.seq_len)
    needs = needs_of(model.config, features)
    dtype = Memory.from_config(config).compute_dtype
    kernel = select_kernel(config.attention, type(model).__name__, needs, group, compute_dtype=dtype)
    set_kernel(model, kernel, features, cp=group.dims.cp)
    return model


def _make_learner_of_bench(
    config: TrainerConfig, model: nn.Module, loss: Mixture, source: str, group: Group
) -> Learner:
    """Create the learner of the sharded policy, with a random reference and critic if the run has them."""
    algorithm, memory = config.algorithm, Memory.from_config(config)
    reference = critic = None
    if algorithm.reference is not None:
        chosen = algorithm.reference.resolve_model(config.model)
        frozen = _random_model(config, chosen, source if chosen is config.model else chosen.source(Path(source)), group)
        freeze_reference(frozen, group, vocabulary=model.config.get_text_config().vocab_size)
        reference = FrozenReference(shard_model(frozen, group).eval())
    if algorithm.critic is not None:
        module = shard_model(to_critic(_random_model(config, config.model, source, group)), group, memory=memory)
        critic = critic_around(module, algorithm.critic, config, group=group)
    optimizer = make_optimizer(model, config.optimizer, group.device)
    limit = config.optimizer.max_grad_norm
    return Learner(model, optimizer, group, loss, limit, reference, critic)


def _make_measurement(
    length: int, batch: Batch, seconds: Sequence[float], cost: Cost, group: Group, *, graphs: int, late_graphs: int
) -> Measurement:
    mfu = None
    if group.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(group.device))
        if peak is not None:
            work = cost.total_flops([len(sample) for sample in batch.samples])
            mfu = [work / one / (peak * group.world_size) for one in seconds]
    memory = group.max_over_ranks({"memory": _peak_memory(group.device)})["memory"]
    return Measurement(length, batch.tokens, list(seconds), mfu, memory, graphs, late_graphs)


def _device_time(device: torch.device) -> float:
    """Wait for all queued device work and return the clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # kernels without this file report the peak since the process started
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def markdown_table(found: Sequence[Measurement], title: str) -> str:
    """Return the measurements as a Markdown table: mean ± standard deviation over the steps, `-` for unknown values."""
    lines = [
        title,
        "",
        "| seq len | tokens per step | MFU % | tokens/s | step time s | peak memory GiB |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        mfu = "-" if one.mfu is None else _mean_and_spread([100 * value for value in one.mfu], 1)
        speed = _mean_and_spread([one.tokens / value for value in one.seconds], 0)
        lines.append(
            f"| {one.seq_len} | {one.tokens} | {mfu} | {speed} | {_mean_and_spread(one.seconds, 3)} | {one.peak_memory / 2**30:.2f} |"
        )
    return "\n".join(lines)


def _mean_and_spread(values: Sequence[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"
