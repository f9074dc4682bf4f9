"""Balance of experts: the auxiliary loss and the correction biases equal an independent computation, frozen routers do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.config.models.parallel import RouterConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.dcp import Part, Progress, load_parts, snapshot_shards, write_shards
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.router_balance import BIAS, Balance
from rlrun.trainer.modeling.router_replay import routing_of
from rlrun.trainer.modeling.shard import Memory
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights.export import export_checkpoint
from rlrun.trainer.weights.hf_writer import publish_version
from tests.support import routed_models
from tests.support.balanced_models import RouterReader, balance_loss, expert_loads
from tests.support.routed_models import LENGTHS, ROW_TOKENS
from tests.support.sets import few_in_gate
from tests.tensors.trainer.test_router_replay import make_steps

CPU = torch.device("cpu")
COEFFICIENT = 0.1
BIASED = "glm4_moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: routed_models.save_model(tmp_path_factory.mktemp(kind), kind)
        for kind in ("qwen3_moe", "gpt_oss", "mixtral", BIASED)
    }


def load(folder: Path, group: Group, mode: Any = "none") -> Any:
    options = LoadOptions(memory=Memory(activations=mode), with_routing=True)
    return load_checked(ModelConfig(path=str(folder)), str(folder), group, seq_len=32, options=options)


def whole(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def balance_gradients(model: Any, batch: Batch) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of the auxiliary loss only, over packed rows, and the loss."""
    routing = routing_of(model)
    assert routing is not None
    routing.balance = Balance(COEFFICIENT, len(batch.samples))
    planned = plan_micro_batches(LENGTHS, row_tokens=ROW_TOKENS, ranks=1).ranks[0]
    assert max(map(len, planned)) > 1
    for row in micro_batches([[batch.samples[i] for i in row] for row in planned], CPU):
        (token_statistics(model, row).logprobs.sum() * 0).backward()
    gradients = {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}
    return gradients, float(routing.take_counts(CPU).aux_loss)


@pytest.mark.parametrize(
    ("kind", "mode"),
    few_in_gate(
        [
            ("qwen3_moe", "none"),
            ("qwen3_moe", "full"),
            ("qwen3_moe", "selective"),
            ("gpt_oss", "none"),
            (BIASED, "full"),
        ],
        [("qwen3_moe", "full"), (BIASED, "full")],
    ),
)
def test_auxiliary_loss_equals_that_of_transformers(
    kind: str, mode: str, folders: dict[str, Path], solo: Group
) -> None:
    batch = routed_models.make_batch(folders[kind], with_routes=False)
    reader = RouterReader(folders[kind])
    want = balance_loss(reader, batch)
    (COEFFICIENT * want).backward()
    found, loss = balance_gradients(load(folders[kind], solo, mode), batch)
    assert loss == pytest.approx(float(want.detach()), rel=1e-5)
    compared = 0
    for name, parameter in reader.model.named_parameters():
        if parameter.grad is None or not float(parameter.grad.norm()):
            continue
        error = float((found[name] - parameter.grad).norm() / parameter.grad.norm())
        assert error < 1e-4, (name, error)
        compared += name.endswith((".router.weight", ".gate.weight"))
    assert compared == len(reader.routers)


def test_passes_without_gradient_have_no_auxiliary_loss(folders: dict[str, Path], solo: Group) -> None:
    batch = routed_models.make_batch(folders["qwen3_moe"], with_routes=False)
    model = load(folders["qwen3_moe"], solo)
    routing = routing_of(model)
    assert routing is not None
    routing.balance = Balance(COEFFICIENT, len(batch.samples))
    with torch.no_grad():
        token_statistics(model, micro_batches([batch.samples], CPU)[0])
    token_statistics(model, micro_batches([[]], CPU)[0]).logprobs.sum().backward()
    assert all(not float(whole(one.grad).abs().sum()) for one in model.parameters() if one.grad is not None)
    assert float(routing.take_counts(CPU).aux_loss) == 0


def values_of(steps: Any) -> dict[str, Tensor]:
    return {name: whole(one.detach()).clone() for name, one in steps._policy.module.state_dict().items()}


def test_updated_biases_equal_an_independent_loop(folders: dict[str, Path], solo: Group) -> None:
    rate, folder = 0.01, folders[BIASED]
    steps = make_steps(
        folder, solo, "Off", router=RouterConfig(bias="Update", bias_rate=rate), optimizer=OptimizerConfig(lr=1e-2)
    )
    reader = RouterReader(folder)
    moved = 0.0
    for step in (1, 2, 3):
        before = values_of(steps)
        reader.load_values(before)
        batch = routed_models.make_batch(folder, step=step, with_routes=False)
        loads = expert_loads(reader, batch)
        steps.train(step, batch, lambda: None)
        after = values_of(steps)
        names = [name for name in after if name.endswith(BIAS)]
        assert len(names) == len(loads)
        for name, load in zip(names, loads, strict=True):
            mean = sum(load) / len(load)
            want = [
                float(bias) + (rate if tokens < mean else -rate if tokens > mean else 0)
                for bias, tokens in zip(before[name], load, strict=True)
            ]
            assert after[name].tolist() == pytest.approx(want, abs=1e-7)
            moved = max(moved, float((after[name] - load_bias(folder, name)).abs().max()))
    assert moved == pytest.approx(3 * rate, rel=1e-3), "an expert is overloaded or underloaded in all steps"


def load_bias(folder: Path, name: str) -> Tensor:
    (found,) = [one[name] for one in map(load_file, sorted(folder.glob("*.safetensors"))) if name in one]
    return found


def test_frozen_bias_does_not_move(folders: dict[str, Path], solo: Group) -> None:
    steps = make_steps(folders[BIASED], solo, "Off")
    before = values_of(steps)
    steps.train(1, routed_models.make_batch(folders[BIASED], with_routes=False), lambda: None)
    after = values_of(steps)
    names = [name for name in after if name.endswith(BIAS)]
    assert names
    assert all(torch.equal(before[name], after[name]) for name in names)


def save_checkpoint(steps: Any, path: Path, group: Group) -> None:
    parts = {"policy": Part(steps._policy.module, steps._learner.optimizer)}
    write_shards(snapshot_shards(parts, Progress(step=1)), path, group, torch.distributed.group.WORLD)


@pytest.mark.parametrize("router", [RouterConfig(bias="Update", bias_rate=0.01), RouterConfig(freeze=True)])
def test_checkpoint_version_and_export_have_the_routers_of_the_trainer(
    router: RouterConfig, folders: dict[str, Path], solo: Group, tmp_path: Path
) -> None:
    folder = folders[BIASED]
    steps = make_steps(folder, solo, "Off", router=router, optimizer=OptimizerConfig(lr=1e-2))
    first = values_of(steps)
    steps.train(1, routed_models.make_batch(folder, with_routes=False), lambda: None)
    trained = values_of(steps)
    routed = [name for name in trained if ".gate." in name]
    changed = {name for name in routed if not torch.equal(first[name], trained[name])}
    expected = set() if router.freeze else set(routed)
    assert changed == expected
    assert any(not torch.equal(first[name], trained[name]) for name in trained if name not in routed)

    save_checkpoint(steps, tmp_path / "checkpoint", solo)
    again = make_steps(folder, solo, "Off", router=router, with_weights=False)
    load_parts({"policy": Part(again._policy.module, again._learner.optimizer)}, tmp_path / "checkpoint")
    resumed = values_of(again)
    assert all(torch.equal(resumed[name], trained[name]) for name in trained)

    config = ModelConfig(path=str(folder), dtype="bfloat16")
    files = model_files(steps._policy.module, config, str(folder))
    publish_version(steps._policy.module, tmp_path / "version", files=files, dtype="bfloat16", group=solo)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", config, str(folder), step=1)
    for place in ("version", "export"):
        stored = {k: v for file in (tmp_path / place).glob("*.safetensors") for k, v in load_file(file).items()}
        for name in routed:
            exact = torch.float32 if name.endswith(BIAS) else torch.bfloat16
            assert torch.equal(stored[name], trained[name].to(exact)), (place, name)


@pytest.mark.parametrize(
    ("kind", "router", "message"),
    [
        ("qwen3_moe", {"bias": "Update"}, r"bias \(Update\) .*has no correction bias .*; set bias: Frozen"),
        ("qwen3", {"bias": "Update"}, r"bias \(Update\) .*it has no routers; set bias: Frozen"),
        ("qwen3", {"aux_loss": 0.1}, r"auxLoss \(0.1\) .*it has no routers; set auxLoss: 0"),
        ("qwen3", {"freeze": True}, r"freeze \(true\) .*it has no routers; set freeze: false"),
        ("ernie4_5_moe", {"bias": "Update"}, r"bias \(Update\) .*keeps its correction bias as a parameter"),
    ],
)
def test_unsupported_router_options_are_refused(
    kind: str, router: dict[str, Any], message: str, tmp_path: Path, solo: Group
) -> None:
    folder = routed_models.save_model(tmp_path / "model", kind)
    with pytest.raises(RoleError, match=message) as caught:
        make_steps(folder, solo, "Off", router=RouterConfig(**router))
    assert caught.value.code == exit_codes.CONFIGURATION


def test_step_with_auxiliary_loss_reports_it_and_moves_routers(folders: dict[str, Path], solo: Group) -> None:
    folder = folders["mixtral"]
    batch = routed_models.make_batch(folder, with_routes=False)
    want = float(balance_loss(RouterReader(folder), batch).detach())
    found = {}
    for aux_loss in (0.0, 0.5):
        steps = make_steps(folder, solo, "Off", router=RouterConfig(aux_loss=aux_loss))
        found[aux_loss] = steps.train(1, batch, lambda: None)
    assert found[0.5]["routing/aux_loss"] == pytest.approx(want, rel=1e-5)
    assert "routing/aux_loss" not in found[0.0]
    assert found[0.5]["loss"] == found[0.0]["loss"]
    assert found[0.5]["grad_norm"] != found[0.0]["grad_norm"]
