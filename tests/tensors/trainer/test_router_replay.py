"""Router replay: own routes give the same bits, an engine's routes give its log-probabilities, and missing routes are native."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.parallel import RouterConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, read_batch, write_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.routes import make_missing
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.batch_step import Steps
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.learner import make_learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import bind_objective
from rlrun.trainer.learning.step_buffer import MicroBatch, micro_batches
from rlrun.trainer.modeling import shard
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.router_replay import RouterError, routing_of
from rlrun.trainer.modeling.shard import Memory, local_part
from rlrun.trainer.modeling.shared_model import load_policy
from rlrun.trainer.proof import architecture_check
from rlrun.trainer.proof.architecture_check import examine_model
from rlrun.trainer.proof.start_check import check_model, load_checked
from rlrun.trainer.ranks.group import Group
from tests.support import routed_models
from tests.support.routed_models import LENGTHS, ROW_TOKENS
from tests.support.sets import few_in_gate
from tests.trainer import architectures

CPU = torch.device("cpu")
FAMILIES = (
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "glm4_moe",
    "minimax_m2",
    "qwen3_5_moe_text",
    "ernie4_5_moe",
    "olmoe",
)
GATE = ("qwen3_moe", "deepseek_v3", "gpt_oss")
"""Softmax before the choice, groups and a bias, softmax after the choice."""
REPLAYED = 1e-5
"""Largest allowed error of a log-probability with replay, in nats."""
NATIVE = 1e-2
"""Least error of a log-probability without replay, in nats."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routed_models.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch(folder: Path) -> Batch:
    return routed_models.make_batch(folder)


@pytest.fixture(scope="module")
def expected(folder: Path, batch: Batch) -> list[Tensor]:
    return routed_models.expected_logprobs(folder, batch)


def load(folder: Path, group: Group, **memory: Any) -> Any:
    options = LoadOptions(memory=Memory(**memory), with_routing=True)
    return load_checked(ModelConfig(path=str(folder)), str(folder), group, seq_len=32, options=options)


def make_rows(batch: Batch, *, with_routes: bool) -> tuple[list[tuple[int, ...]], list[MicroBatch]]:
    planned = list(plan_micro_batches(LENGTHS, row_tokens=ROW_TOKENS, ranks=1).ranks[0])
    assert max(map(len, planned)) > 1, "rows of one sequence prove nothing about packing"
    return planned, micro_batches([[batch.samples[i] for i in row] for row in planned], CPU, with_routes=with_routes)


def largest_error(model: nn.Module, batch: Batch, expected: list[Tensor], *, with_routes: bool) -> float:
    planned, rows = make_rows(batch, with_routes=with_routes)
    errors = []
    with torch.no_grad():
        for indices, row in zip(planned, rows, strict=True):
            want = torch.cat([expected[i] for i in indices])
            errors.append(float((token_statistics(model, row).logprobs - want).abs().max()))
    return max(errors)


def examine_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(architecture_check, "_found", {})
    return examine_model(architectures.whole_model(kind), seq_len=512)


@pytest.mark.parametrize("kind", few_in_gate(FAMILIES, GATE))
def test_family_replays_its_own_routes_bit_by_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = examine_kind(kind, monkeypatch)
    assert verdict.fault is None
    assert verdict.routing_fault is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen3", "it has no routers"), ("jamba", "its layers have no router of a known kind")],
)
def test_model_without_known_routers_has_a_reason(kind: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine_kind(kind, monkeypatch).routing_fault == reason


def choose_twice(router: Any, hidden: Tensor) -> Any:
    scores = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight).softmax(-1)
    torch.topk(scores, router.top_k, dim=-1)
    values, indices = torch.topk(scores, router.top_k, dim=-1)
    return scores, values, indices


def choose_unseen(router: Any, hidden: Tensor) -> Any:
    scores = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight).softmax(-1)
    values, indices = scores.sort(-1, descending=True)
    return scores, values[:, : router.top_k], indices[:, : router.top_k]


@pytest.mark.parametrize(("forward", "calls"), [(choose_twice, 2), (choose_unseen, 0)])
def test_router_with_other_calls_is_not_replayed(forward: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", forward)
    fault = examine_kind("qwen3_moe", monkeypatch).routing_fault
    assert f"Qwen3MoeTopKRouter chooses its experts with {calls} calls of topk, expected 1" in fault


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_replayed_routes_of_engine_give_the_logprobs_of_its_experts(
    mode: str, folder: Path, batch: Batch, expected: list[Tensor], solo: Group
) -> None:
    model = load(folder, solo, activations=mode)
    assert largest_error(model, batch, expected, with_routes=False) > NATIVE
    assert largest_error(model, batch, expected, with_routes=True) <= REPLAYED


def test_batch_file_keeps_replayed_logprobs(
    tmp_path: Path, folder: Path, batch: Batch, expected: list[Tensor], solo: Group
) -> None:
    write_batch(tmp_path / "b", batch)
    assert largest_error(load(folder, solo), read_batch(tmp_path / "b"), expected, with_routes=True) <= REPLAYED


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_part(one.grad).clone() for name, one in model.named_parameters() if one.grad is not None}


def row_gradients(model: nn.Module, rows: list[MicroBatch]) -> dict[str, Tensor]:
    """Compute all rows before the first backward pass, as in a pipeline."""
    losses = [token_statistics(model, row).logprobs.square().sum() for row in rows]
    for loss in losses:
        loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("mode", few_in_gate(("selective", "attention", "full", "offload"), ("full",)))
def test_recomputation_replays_the_routes_of_its_own_row(mode: str, folder: Path, batch: Batch, solo: Group) -> None:
    _, rows = make_rows(batch, with_routes=True)
    assert len(rows) > 1
    want = row_gradients(load(folder, solo), rows)
    model = load(folder, solo, activations=mode)
    found = row_gradients(model, rows)
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-3), name


def test_recomputation_does_not_count_tokens_twice(folder: Path, batch: Batch, solo: Group) -> None:
    _, rows = make_rows(batch, with_routes=True)
    model = load(folder, solo, activations="full")
    row_gradients(model, rows)
    routing = routing_of(model)
    assert routing is not None
    counts = routing.take_counts(CPU)
    layers = routing.shape.layers
    assert counts.tokens[:2].tolist() == [sum(LENGTHS) * layers, (sum(LENGTHS) - len(LENGTHS)) * layers]
    assert counts.load.sum(-1).tolist() == [sum(LENGTHS) * routing.shape.top_k] * layers
    assert counts.tokens[2] > 0, "an engine in bfloat16 must choose other experts somewhere"


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_layers_replay_routes_without_a_graph_per_row(
    mode: str, folder: Path, batch: Batch, expected: list[Tensor], solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are traced without lowering, which needs no C++ compiler."""
    monkeypatch.setattr(shard.torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(shard, "has_compiler", lambda: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load(folder, solo, compile=True, activations=mode)
    assert largest_error(model, batch, expected, with_routes=True) <= REPLAYED
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert largest_error(model, batch, expected, with_routes=True) <= REPLAYED
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


def test_missing_routes_are_native(folder: Path, batch: Batch, solo: Group) -> None:
    """Samples without routes, and with missing routes only, have exactly the log-probabilities of native routing."""
    samples = []
    for index, one in enumerate(batch.samples):
        assert one.routes is not None
        missing = make_missing(len(one), *one.routes.shape[1:], one.routes.dtype)
        samples.append(dataclasses.replace(one, routes=None if index % 2 else missing))
    model = load(folder, solo)
    _, native = make_rows(batch, with_routes=False)
    _, missing_rows = make_rows(Batch(1, 1, tuple(samples)), with_routes=True)
    assert any(row.routes is not None for row in missing_rows)
    with torch.no_grad():
        for row, other in zip(native, missing_rows, strict=True):
            assert torch.equal(token_statistics(model, row).logprobs, token_statistics(model, other).logprobs)


def test_routes_of_another_row_are_refused(folder: Path, batch: Batch, solo: Group) -> None:
    _, rows = make_rows(batch, with_routes=True)
    assert rows[0].routes is not None
    wrong = dataclasses.replace(rows[0], routes=rows[0].routes[:-1])
    with pytest.raises(RouterError, match="a router chooses"):
        token_statistics(load(folder, solo), wrong)


def make_steps(folder: Path, group: Group, replay: str, *, with_weights: bool = True, **changes: Any) -> Steps:
    own: dict[str, Any] = {
        "algorithm": AlgorithmConfig(),
        "optimizer": OptimizerConfig(lr=1e-3),
        "router": RouterConfig(replay=replay),
    }
    config = TrainerConfig(
        name="test",
        uid="uid",
        output_dir=str(folder),
        model=ModelConfig(path=str(folder), dtype="float32"),
        max_steps=3,
        seq_len=32,
        micro_batch_tokens=ROW_TOKENS,
        seed=0,
        checkpoint=CheckpointConfig(),
        **(own | changes),
    )
    policy = load_policy(config, str(folder), group, with_weights=with_weights, check=check_model)
    optimizer = make_optimizer(policy.module, config.optimizer, group.device)
    learner = make_learner(
        config, policy.module, optimizer, bind_objective(config), source=str(folder), group=group, check=check_model
    )
    return Steps(config, policy, learner)


def test_step_reports_replayed_and_changed_routes(folder: Path, batch: Batch, solo: Group) -> None:
    replayed = make_steps(folder, solo, "Rollout").train(1, batch, lambda: None)
    tokens = sum(LENGTHS)
    assert replayed["routing/replayed_share"] == pytest.approx((tokens - len(LENGTHS)) / tokens)
    assert 0 < replayed["routing/changed_share"] < 0.5
    native = make_steps(folder, solo, "Off").train(1, batch, lambda: None)
    assert (native["routing/replayed_share"], native["routing/changed_share"]) == (0, 0)
    assert native["routing/max_violation"] > 0
    assert native["loss"] != replayed["loss"]


def test_largest_violation_is_that_of_the_worst_layer(folder: Path, batch: Batch, solo: Group) -> None:
    """Every token uses experts 0 and 1 in the first layer and evenly distributed ones in the others."""
    samples = []
    for one in batch.samples:
        assert one.routes is not None
        routes = np.zeros_like(one.routes)
        routes[..., 1] = 1
        samples.append(dataclasses.replace(one, routes=routes))
    steps = make_steps(folder, solo, "Rollout")
    routing = routing_of(steps._policy.module)
    assert routing is not None
    found = steps.train(1, Batch(1, 1, tuple(samples)), lambda: None)
    experts, top_k = routing.shape.experts, routing.shape.top_k
    assert found["routing/max_violation"] == pytest.approx(experts / top_k - 1)
    assert found["routing/replayed_share"] == 1


def test_step_replay_uses_the_experts_of_the_first_pass(folder: Path, batch: Batch, solo: Group) -> None:
    """The second update has other weights; only replay keeps its experts."""
    options = {
        "updates_per_step": 2,
        "optimizer": OptimizerConfig(lr=3e-2),
        "algorithm": AlgorithmConfig(preset="gspo"),
    }
    found = {}
    for replay in ("Off", "Step"):
        steps = make_steps(folder, solo, replay, **options)
        found[replay] = steps.train(1, batch, lambda: None)
    assert found["Step"]["routing/replayed_share"] == 1
    assert found["Step"]["routing/changed_share"] > 0
    assert found["Off"]["routing/replayed_share"] == 0
    assert found["Off"]["loss"] != found["Step"]["loss"]


@pytest.mark.parametrize("updates", [1, 2])
def test_later_passes_replay_the_routes_of_their_samples(folder: Path, batch: Batch, solo: Group, updates: int) -> None:
    passes = {"updates_per_step": updates, "epochs_per_step": 2}
    found = make_steps(folder, solo, "Rollout", **passes).train(1, batch, lambda: None)
    tokens = sum(LENGTHS)
    assert found["routing/replayed_share"] == pytest.approx((tokens - len(LENGTHS)) / tokens)
    first = make_steps(folder, solo, "Rollout", updates_per_step=updates).train(1, batch, lambda: None)
    assert first["routing/replayed_share"] == pytest.approx(found["routing/replayed_share"])


def test_replay_is_refused_for_a_model_without_routers(tmp_path: Path, solo: Group) -> None:
    dense = routed_models.save_model(tmp_path / "dense", "qwen3")
    with pytest.raises(
        RoleError, match=r"trainer\.router\.replay \(Rollout\) is not supported .*it has no routers; set replay: Off"
    ) as caught:
        make_steps(dense, solo, "Rollout")
    assert caught.value.code == exit_codes.CONFIGURATION


def test_batch_with_unknown_expert_is_refused(tmp_path: Path, folder: Path, batch: Batch, solo: Group) -> None:
    first = batch.samples[0]
    assert first.routes is not None
    routes = first.routes.copy()
    routes[1, 0] = (0, 200)
    write_batch(tmp_path / "b", Batch(1, 1, (dataclasses.replace(first, routes=routes),)))
    with pytest.raises(RoleError, match="sample 0: routes contain expert 200, the model has 8 experts"):
        make_steps(folder, solo, "Rollout").load_batch(tmp_path / "b", 1, written_by=1)
    make_steps(folder, solo, "Off").load_batch(tmp_path / "b", 1, written_by=1)
