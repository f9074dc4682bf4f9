"""Grid of layouts: `python -m tests.trainer.layouts FOLDER PORT CASE...` forks four ranks that train small models in
every layout.

`test_parallel_layouts` forks this program from the process that has imported the trainer (`zygote`). A case is
`family:layout`, optionally followed by another colon and an activation mode, `local` (gradient sums) or `moments`
(moments in host memory). A family `<model>+lora` trains only adapters, `<model>+muon` uses Muon, and `<model>+critic`
is a critic. Rank 0 computes the reference in plain torch from the whole batch, without the trainer's loop. Every case
starts from the checkpoint of the previous case of its family, written in another layout, and trains a second step. The
results are written to `FOLDER/found.json`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
import zlib
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from rlrun.algorithms import LossBatch, Mixture, Objective, Regularizers
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.checkpoint_manifest import TRAINER_PART, describe_part
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning import optimizers
from rlrun.trainer.learning.forward import TokenStatistics, release_gathered, token_statistics
from rlrun.trainer.learning.run_objective import Update, step_objective
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import parameter_checksum, train_step
from rlrun.trainer.modeling import lora, packed_attention
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.model_files import ModelFiles
from rlrun.trainer.modeling.parallel.pipeline_stages import stage_of
from rlrun.trainer.modeling.shard import Memory
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group, Meshes, ParallelDims, process_group
from rlrun.trainer.weights import hf_writer
from tests.support.process_groups import assert_threads_ended, count_groups, created_groups_destroyed
from tests.trainer import divided_critic, family_models, pipelines
from tests.trainer.held import watched

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp4": {},
    "hsdp2x2": {"dp_replicate": 2},
    "tp2xfsdp2": {"tp": 2},
    "tp2xreplicate2": {"tp": 2, "dp_replicate": 2},
    "tp4": {"tp": 4},
    "cp2xfsdp2": {"cp": 2},
    "cp2xreplicate2": {"cp": 2, "dp_replicate": 2},
    "cp4": {"cp": 4},
    "tp2xcp2": {"tp": 2, "cp": 2},
    "ep2xfsdp2": {"ep": 2},
    "ep4": {"ep": 4},
    "ep2xreplicate2": {"ep": 2, "dp_replicate": 2},
    "ep2xtp2": {"ep": 2, "tp": 2},
    "ep2xcp2": {"ep": 2, "cp": 2},
    "ep4xcp2": {"ep": 4, "cp": 2},
    "pp2xfsdp2": {"pp": 2},
    "pp2xreplicate2": {"pp": 2, "dp_replicate": 2},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "pp2xcp2": {"pp": 2, "cp": 2},
    "pp2xep2": {"pp": 2, "ep": 2},
    "pp4": {"pp": 4},
    "pp2xreplicate2-interleaved": {"pp": 2, "dp_replicate": 2, "schedule": "Interleaved1F1B"},
    "pp2xfsdp2-zero": {"pp": 2, "schedule": "InterleavedZeroBubble"},
    "pp2xreplicate2-zbv": {"pp": 2, "dp_replicate": 2, "schedule": "ZBVZeroBubble"},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
}
"""Sizes of layouts of four ranks; the last two have two ranks."""
RANKS = 4
LR = 1e-2
LORA = LoRAConfig(rank=4, alpha=8)
LOSS = step_objective(AlgorithmConfig(), 64)
OTHER = Objective("sft", aggregation="seq_mean_token_mean", regularizers=Regularizers(entropy=0.1))
"""Environment of every third sample; some ranks have no such sample in a row."""
_KINDS = {"moe": "qwen3_moe", "few": "qwen3_moe", "deep": "llama"}
"""Model types of families with another name here. The deep model has its embedding on the first and the last of four
stages; the other has fewer experts than ranks.
"""


def make_model(family: str, seed: int) -> Any:
    packed_attention.register_attention()
    sizes = {"deep": {"num_hidden_layers": 5}, "few": {"num_experts": 2}}.get(family, {})
    model = family_models.make_model(_KINDS.get(family, family), seed, **sizes)
    model.set_attn_implementation(packed_attention.NAME)
    return model


def make_batch(step: int) -> Batch:
    """Build a batch with lengths that neither rows nor context parts divide evenly, at least two rows per rank, and a
    separate temperature per sample.
    """
    rng = np.random.default_rng(step)
    samples = []
    for index, length in enumerate((23, 3, 9, 14, 17, 5, 11, 19, 6, 13, 21)):
        mask = np.arange(length) >= min(4, length - 1)
        samples.append(
            Sample(
                input_ids=rng.integers(0, 96, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -4.5, 0).astype(np.float32),
                versions=np.where(mask, step - 1, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                temperature=float(rng.choice([0.7, 1.0, 1.3])),
                environment="other" if index % 3 == 1 else "random",
                task_id=str(index),
                group=index,
                rollout=0,
                dispatch_version=step - 1,
                reward=0.0,
            )
        )
    return Batch(step, 1, tuple(samples))


def make_optimizer(model: nn.Module, family: str, *, offload: bool = False) -> torch.optim.Optimizer:
    """Build AdamW or Muon with an AdamW that is smooth for small gradients, so that rounding errors do not flip the
    sign of updates.
    """
    name = "muon" if family.endswith("+muon") else "adamw"
    config = OptimizerConfig(name=name, lr=LR, eps=1e-2, weight_decay=0.0, offload=offload)
    return optimizers.make_optimizer(model, config, torch.device("cpu"))


def with_adapters(family: str) -> bool:
    return family.endswith("+lora")


def prepare(model: nn.Module, family: str) -> None:
    if with_adapters(family):
        lora.inject_adapters(model, LORA)


def initialise(model: nn.Module, family: str) -> None:
    """Move adapters away from 0, because A has no gradient at 0."""
    if with_adapters(family):
        lora.initialize_adapters(model, 0)
        for name, layer in lora.layers_with_adapter(model).items():  # by name, because a stage has only some of them
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            lora.fill_parameter(layer.lora_B, 0.1 * torch.randn(layer.lora_B.shape, generator=generator))


def eager_statistics(model: Any, batch: Batch) -> TokenStatistics:
    """Return log-probability and entropy of every loss token and 0 elsewhere, with transformers' own attention on
    single sequences.
    """
    logprobs, entropies = [], []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.input_ids).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / sample.temperature
        distribution = logits.log_softmax(-1)
        mask = torch.from_numpy(sample.loss_mask)
        chosen = distribution.gather(1, ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        for found, values in ((logprobs, chosen), (entropies, entropy)):
            found.append(torch.where(mask, torch.cat([values.new_zeros(1), values]), 0))
    return TokenStatistics(torch.cat(logprobs), torch.cat(entropies))


def reference(family: str, folder: Path) -> list[dict[str, Any]]:
    """Train two steps on one rank with transformers and return loss, gradient and parameters of each."""
    model = make_model(family.partition("+")[0], 0)
    files_of(model, folder / family)
    prepare(model, family)
    initialise(model, family)
    model.set_attn_implementation("eager")
    optimizer = make_optimizer(model, family)
    steps: list[dict[str, Any]] = []
    for step in (1, 2):
        batch = make_batch(step)
        row = micro_batch(batch.samples, torch.device("cpu"))
        statistics = eager_statistics(model, batch)
        loss = torch.zeros(())
        for one, environment in ((LOSS, "random"), (OTHER, "other")):
            own = torch.tensor([sample.environment == environment for sample in batch.samples])
            loss = (
                loss
                + one(
                    statistics.logprobs,
                    LossBatch(
                        inference_logprobs=row.inference_logprobs,
                        advantages=row.advantages,
                        mask=row.mask & own.repeat_interleave(torch.tensor(row.packed.lengths)),
                        sequence_lengths=row.packed.lengths,
                        denominator=one.denominator(row.mask, row.packed.lengths),
                        entropy=statistics.entropy,
                    ),
                ).loss
            )
        loss.backward()
        gradient = gradients(model)
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        if step == 1:
            torch.save(
                statistics.logprobs.detach(), folder / f"{family}-logprobs.pt"
            )  # all ranks compare theirs with it
        optimizer.step()
        optimizer.zero_grad()
        steps.append(
            {
                "loss": float(loss.detach()),
                "grad_norm": float(norm),
                "gradient": gradient,
                "parameters": adapters_of(model)
                if with_adapters(family)
                else files_of(model, folder / f"{family}-{step}"),
            }
        )
    return steps


def critic_reference(family: str, folder: Path) -> dict[str, Any]:
    model = make_model(family.partition("+")[0], 0)
    files_of(model, folder / family)
    return divided_critic.reference(model, make_batch(1))


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in lora.adapter_tensors(model).items()}


def files_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return the tensors that `transformers` writes for the model, by name."""
    model.save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference relative to the largest value of its tensor."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max().clamp(min=1e-3)) for n, e in expected.items())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    whole = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        gradient = parameter.grad.detach()
        whole[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
    if (stage := stage_of(model)) is None:
        return whole
    stages: list[Any] = [None] * stage.count
    dist.all_gather_object(stages, whole, group=stage.group)
    for earlier, later in combinations(stages, 2):  # a tied embedding is on two stages with bitwise equal gradients
        assert all(torch.equal(earlier[name], later[name]) for name in earlier.keys() & later.keys())
    return {name: gradient for one in stages for name, gradient in one.items()}


def row_tokens(group: Group) -> int:
    """Return a size that gives at least two rows per rank; fewer if few ranks share all rows, because DTensor plans
    all operations again for each row length.
    """
    if group.dims.pp > 1 or group.data_size > 2:
        return 32
    return 36 if group.data_size == 2 else 80


def logprob_error(model: nn.Module, batch: Batch, expected: Tensor, group: Group) -> float:
    """Return the largest error of all ranks in the rows of a step, whose lengths already have plans."""
    starts = torch.tensor([0, *(len(sample) for sample in batch.samples)]).cumsum(0)
    dealt = plan_micro_batches(
        [len(sample) for sample in batch.samples], row_tokens=row_tokens(group), ranks=group.data_size
    )
    largest = 0.0
    for row in dealt.ranks[group.data_rank]:
        want = torch.cat([expected[starts[index] : starts[index + 1]] for index in row])
        with torch.no_grad():
            found = token_statistics(model, micro_batch([batch.samples[index] for index in row], group.device)).logprobs
        largest = max(largest, float((found - want).abs().max()))
    return group.max_over_ranks({"error": largest})["error"]


def one_step(model: nn.Module, optimizer: Any, step: int, group: Group) -> tuple[dict[str, float], dict[str, Tensor]]:
    batch = make_batch(step)
    lengths = [len(sample) for sample in batch.samples]
    rows = plan_micro_batches(lengths, row_tokens=row_tokens(group), ranks=group.data_size).ranks[group.data_rank]
    assert len(rows) >= 2
    seen: dict[str, Tensor] = {}
    hook = optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(model)))
    with watched(model) as held:
        metrics = train_step(
            model,
            optimizer,
            Update(batch, rows),
            group=group,
            loss=Mixture(LOSS, {"other": OTHER}),
            lr=LR,
            max_grad_norm=None,
        )
    hook.remove()
    return metrics | group.max_over_ranks({"held": max(held.gradients) / held.shard}), seen


def published(model: nn.Module, path: Path, group: Group, family: str) -> dict[str, Tensor]:
    if with_adapters(family):
        hf_writer.publish_adapter(model, path, config={"r": LORA.rank}, dtype="float32", group=group)
    else:
        hf_writer.publish_version(model, path, files=ModelFiles({}), dtype="float32", group=group)
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def run_case(case: str, before: Path | None, folder: Path, world: Group, expected: list[Any]) -> Any:
    family, layout, *memory = case.split(":")
    offload = "moments" in memory
    meshes = Meshes(ParallelDims.from_config(ParallelismConfig(**LAYOUTS[layout]), world.world_size), "cpu")
    group = Group(world.rank, world.world_size, world.device, meshes.layers, meshes)
    whole = make_model(family.partition("+")[0], 0)
    prepare(whole, family)
    initialise(whole, family)
    exact = parameter_checksum(whole)
    source = folder / family
    options: dict[str, Any] = {
        "memory": Memory(
            **{"accumulation" if word == "local" else "activations": word for word in memory if word != "moments"}
        ),  # type: ignore[arg-type]
        "prepare": lambda model: prepare(model, family),
    }
    config = ModelConfig(path=str(source))
    model = load_checked(config, str(source), group, seq_len=128, options=LoadOptions(**options))
    initialise(model, family)
    optimizer = make_optimizer(model, family, offload=offload)
    found: dict[str, Any] = {"checksum_exact": parameter_checksum(model) == exact}
    if group.dims.pp > 1:
        found["validation_error"] = pipelines.validation_error(model, whole, make_batch(1), group)
        found["linear_error"] = pipelines.linear_error(model, make_batch(1), group)
    else:
        logprobs = torch.load(folder / f"{family}-logprobs.pt")
        found["logprob_error"] = logprob_error(model, make_batch(1), logprobs, group)
    release_gathered(model)
    metrics, gradient = one_step(model, optimizer, 1, group)
    here = folder / case.replace(":", "-")
    state = dcp.snapshot_shards({POLICY: Part(model, optimizer)}, Progress(1, 0))
    peers = dist.group.WORLD
    assert peers is not None
    entries = dcp.write_shards(state, here / "checkpoint", group, peers)
    if group.leads:
        found["entries_exact"] = set(entries) == set(
            describe_part(here / "checkpoint", here / "checkpoint" / TRAINER_PART)
        )
    else:
        assert not entries
    weights = published(model, here / "weights", group, family)
    found |= {name: metrics[name] for name in ("loss", "grad_norm", "held")}
    saved_checksum = parameter_checksum(model)
    if group.leads:
        want = expected[0]
        found["gradient_error"] = error(gradient, want["gradient"])
        found["published_error"] = error(weights, want["parameters"])
        found["expected"] = {"loss": want["loss"], "grad_norm": want["grad_norm"]}
    if group.dims.pp > 1 and not with_adapters(family):
        found["sent_exact"] = pipelines.sent_exact(model, weights, group)
    if before is not None:  # saved by another layout after the same step
        other = load_checked(
            config, str(source), group, seq_len=128, options=LoadOptions(with_weights=with_adapters(family), **options)
        )
        moments = make_optimizer(other, family, offload=offload)
        progress = dcp.load_parts({POLICY: Part(other, moments)}, before)
        metrics, gradient = one_step(other, moments, 2, group)
        weights = published(other, here / "weights_of_step_2", group, family)
        found["resumed"] = {"step": progress.step, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
        if group.leads:
            want = expected[1]
            found["resumed"]["gradient_error"] = error(gradient, want["gradient"])
            found["resumed"]["published_error"] = error(weights, want["parameters"])
            found["resumed"]["expected"] = {"loss": want["loss"], "grad_norm": want["grad_norm"]}
    assert saved_checksum != exact
    return found, here / "checkpoint"


def run_critic(case: str, folder: Path, world: Group, expected: Any) -> dict[str, float]:
    family, layout = case.split(":")
    meshes = Meshes(ParallelDims.from_config(ParallelismConfig(**LAYOUTS[layout]), world.world_size), "cpu")
    group = Group(world.rank, world.world_size, world.device, meshes.layers, meshes)
    return divided_critic.run(folder / family, make_batch(1), group, expected, row_tokens=row_tokens(group))


def rank_main(folder: Path, cases: list[str]) -> None:
    found: dict[str, Any] = {}
    references: dict[str, Any] = {}
    last: dict[str, Path] = {}
    with process_group(0) as world:
        groups = count_groups()
        for case in cases:
            family = case.partition(":")[0]
            if world.leads and family not in references:
                references[family] = (
                    critic_reference(family, folder) if family.endswith("+critic") else reference(family, folder)
                )
            world.barrier()
            expected = references.get(family, [])
            with created_groups_destroyed():
                if family.endswith("+critic"):
                    result = run_critic(case, folder, world, expected)
                else:
                    result, last[family] = run_case(case, last.get(family), folder, world, expected)
            assert_threads_ended(most=groups)
            if world.leads:
                found[case] = result
                (folder / "found.json").write_text(json.dumps(found, indent=1))
        dist.barrier()


def fork_ranks(count: int, port: int, act: Callable[[], None]) -> int:
    """Fork `count` ranks that run `act` from this process, which has imported everything; a failing rank ends the
    others.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ranks = set()
    gc.freeze()  # otherwise each rank's garbage collector would visit and copy the imported objects
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            code = 1
            try:
                # Set it here, in a single thread: torch's pool does not survive the fork, and two threads cannot
                # replace it concurrently.
                torch.set_num_threads(1)
                act()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ranks.add(pid)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def main(arguments: list[str]) -> int:
    """Return 0 if all ranks ended without an error."""
    folder, cases = Path(arguments[0]), arguments[2:]
    return fork_ranks(RANKS, int(arguments[1]), lambda: rank_main(folder, cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
