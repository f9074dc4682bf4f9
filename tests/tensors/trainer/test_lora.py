"""LoRA adapters: PEFT's numbers, frozen base, reproducible initialization and loadable files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import parameter_checksum, train_step
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.modeling.shared_model import Adapters
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.proof.small_models import small_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import export, hf_writer
from tests.tensors.trainer.companions import SMOOTH

CONFIG = LoRAConfig(rank=4, alpha=6)


def adapt(model: nn.Module, group: Group | None = None, config: LoRAConfig = CONFIG, seed: int = 0) -> nn.Module:
    lora.inject_adapters(model, config)
    if group is not None:
        shard_model(model, group)
    lora.initialize_adapters(model, seed)
    return model


def disturb(model: nn.Module) -> None:
    """Set the adapters to values like after some training."""
    torch.manual_seed(1)
    for layer in lora.layers_with_adapter(model).values():
        torch.nn.init.normal_(local_part(layer.lora_B.data), std=0.3)


def train(
    model: nn.Module, group: Group, batch: Batch, steps: int = 3, optimizer_config: OptimizerConfig | None = None
) -> None:
    optimizer = make_optimizer(model, optimizer_config or OptimizerConfig(), group.device)
    rows = [tuple(range(len(batch.samples)))]
    for _ in range(steps):
        metrics = train_step(
            model,
            optimizer,
            Update(batch, rows),
            group=group,
            loss=Mixture(Objective("aipo")),
            lr=SMOOTH.lr,
            max_grad_norm=None,
        )
        assert metrics["grad_norm"] > 0


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_part(p.detach()).clone() for name, p in model.named_parameters()}


def test_lora_layer_equals_peft_definition() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    adapted = lora.LoRALinear.convert(layer, CONFIG)
    nn.init.normal_(adapted.lora_A)
    nn.init.normal_(adapted.lora_B)
    update = torch.einsum("or,ri,bi->bo", adapted.lora_B, adapted.lora_A, x)
    torch.testing.assert_close(layer(x), x @ weight.T + bias + 6 / 4 * update)
    merged = lora.merge_adapter(weight, adapted.lora_A, adapted.lora_B, 6 / 4)
    torch.testing.assert_close(linear(x, merged, bias), layer(x))


def test_fresh_adapter_leaves_model_output_unchanged(
    make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    row = micro_batch(make_batch([9, 7]).samples, torch.device("cpu"))
    expected = token_statistics(make_model(), row).logprobs
    model = adapt(make_model())
    assert torch.equal(token_statistics(model, row).logprobs, expected)
    disturb(model)
    assert not torch.allclose(token_statistics(model, row).logprobs, expected, atol=1e-3)


def test_training_changes_only_adapters(
    solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    model = adapt(make_model(), solo)
    before, checksum = parameters(model), parameter_checksum(model)
    train(model, solo, make_batch([9, 7]))
    after = parameters(model)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) != lora.of_adapter(name), name
    trained = parameter_checksum(model)
    assert trained != checksum
    with torch.no_grad():
        local_part(model.lm_head.weight).add_(1)
    assert parameter_checksum(model) == trained, "what is frozen does not count"


def test_optimizer_state_covers_only_adapters(
    solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    model = adapt(make_model(), solo)
    optimizer = make_optimizer(model, OptimizerConfig(), solo.device)
    train_step(
        model,
        optimizer,
        Update(make_batch([9, 7]), [(0, 1)]),
        group=solo,
        loss=Mixture(Objective("aipo")),
        lr=SMOOTH.lr,
        max_grad_norm=1.0,
    )
    kept = {id(parameter) for parameter in optimizer.state}
    assert kept == {id(p) for name, p in model.named_parameters() if lora.of_adapter(name)}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_adapter_initialization_depends_on_seed_and_name(solo: Group, make_model: Callable[..., nn.Module]) -> None:
    torch.manual_seed(5)
    plain = parameters(adapt(make_model()))
    torch.manual_seed(6)
    sharded = parameters(adapt(make_model(), solo))
    assert all(torch.equal(sharded[name], plain[name]) for name in plain)
    few = parameters(adapt(make_model(), config=CONFIG.model_copy(update={"targets": ["v_proj"]})))
    name = "model.layers.1.self_attn.v_proj.lora_A"
    assert torch.equal(few[name], plain[name])
    assert not torch.equal(plain[name], plain[name.replace("layers.1", "layers.0")])
    assert not torch.equal(parameters(adapt(make_model(), seed=1))[name], plain[name])
    assert float(plain[name].abs().max()) <= 32**-0.5
    assert not plain["model.layers.1.self_attn.v_proj.lora_B"].any()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (["q_proj", "mlp.*"], {"q_proj", "gate_proj", "up_proj", "down_proj"}),
        (["layers.1.self_attn.?_proj"], {f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"}),
    ],
)
def test_lora_targets_select_layers(
    make_model: Callable[..., nn.Module], targets: list[str], expected: set[str]
) -> None:
    config = CONFIG.model_copy(update={"targets": targets})
    model = adapt(make_model(), config=config)
    assert set(lora.adapter_config(model, config, "base")["target_modules"]) == expected
    chosen = {
        name for name in lora.layers_with_adapter(model) if any(f".{name}".endswith(f".{end}") for end in expected)
    }
    assert set(lora.layers_with_adapter(model)) == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["q_proj", "qproj"]}, "lora.targets: 'qproj' matches no .* such as down_proj, gate_proj, k_proj"),
        ({"targets": ["lm_head"]}, "lora.targets: 'lm_head' matches no"),
        ({"modules_to_save": ["head"]}, "lora.modulesToSave: 'head' matches no .* lm_head"),
        ({"targets": ["mlp.*"], "modules_to_save": ["mlp"]}, "no adapter remains"),
    ],
)
def test_impossible_lora_targets_are_refused(
    make_model: Callable[..., nn.Module], options: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(RoleError, match=message):
        lora.inject_adapters(make_model(), CONFIG.model_copy(update=options))


def test_modules_to_save_are_trained_in_full(
    solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    model = adapt(make_model(), solo, CONFIG.model_copy(update={"modules_to_save": ["lm_head", "layers.0.mlp"]}))
    before = parameters(model)
    train(model, solo, make_batch([9, 7]))
    changed = {name for name, tensor in parameters(model).items() if not torch.equal(tensor, before[name])}
    assert {name for name in changed if not lora.of_adapter(name)} == {
        "lm_head.weight",
        *(f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert not any("layers.0.mlp" in name for name in changed if lora.of_adapter(name))


def test_lora_dropout_applies_only_to_the_update() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5, bias=False), torch.randn(4, 6)
    plain = layer(x)
    adapted = lora.LoRALinear.convert(layer, CONFIG.model_copy(update={"dropout": 0.5}))
    nn.init.normal_(adapted.lora_A)
    nn.init.zeros_(adapted.lora_B)
    assert torch.equal(adapted(x), plain), "an update of nothing, dropped or not"
    nn.init.normal_(adapted.lora_B)
    assert not torch.equal(adapted(x), adapted(x))
    adapted.eval()
    torch.testing.assert_close(adapted(x), linear(x, lora.merge_adapter(layer.weight, layer.lora_A, layer.lora_B, 1.5)))


def test_published_adapter_has_peft_names(tmp_path: Path, solo: Group, make_model: Callable[..., nn.Module]) -> None:
    model = adapt(make_model(), solo)
    disturb(model)
    path = RunPaths(tmp_path).version(3, 1)
    config = lora.adapter_config(model, CONFIG, "base")
    hf_writer.publish_adapter(model, path, config=config, dtype="float32", group=solo)
    assert [version.step for version in RunPaths(tmp_path).versions_on_disk()] == [3]
    assert sorted(file.name for file in path.iterdir()) == [
        "COMPLETE", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    written = json.loads((path / "adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"], written["use_rslora"]) == ("LORA", 4, 6, False)
    tensors = load_file(path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    name = "model.layers.1.mlp.down_proj"
    down = model.get_submodule(name)
    assert torch.equal(tensors[f"base_model.model.{name}.lora_A.weight"], local_part(down.lora_A))
    assert torch.equal(tensors[f"base_model.model.{name}.lora_B.weight"], local_part(down.lora_B))


def test_merged_weights_equal_the_adapted_model(
    tmp_path: Path, solo: Group, source: Path, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    config = ModelConfig(path=str(source), dtype="float32")
    model = make_model()
    files = model_files(model, config, str(source))
    adapt(model, solo, CONFIG.model_copy(update={"modules_to_save": ["lm_head"]}))
    train(model, solo, make_batch([9, 7]))
    path = RunPaths(tmp_path).version(1, 1)
    hf_writer.publish_version(model, path, files=files, dtype="float32", group=solo)
    merged = AutoModelForCausalLM.from_pretrained(path)
    row = micro_batch(make_batch([9]).samples, torch.device("cpu"))
    with torch.no_grad():
        expected = token_statistics(model, row).logprobs[2:]
        ids = row.input_ids[None]
        logits = merged(ids).logits[0].float() / row.temperatures[:, None]
        found = logits.log_softmax(-1)[1:-1].gather(1, ids[0, 2:, None])[:, 0]
        start = AutoModelForCausalLM.from_pretrained(source)(ids).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(start, merged(ids).logits[0], atol=1e-3)


@pytest.mark.parametrize("full", [[], ["lm_head"]])
def test_exported_checkpoint_includes_the_adapter_updates(
    tmp_path: Path,
    solo: Group,
    source: Path,
    make_model: Callable[..., nn.Module],
    make_batch: Callable[..., Batch],
    full: list[str],
) -> None:
    config, lora_config = (
        ModelConfig(path=str(source), dtype="float32"),
        CONFIG.model_copy(update={"modules_to_save": full}),
    )
    model = make_model()
    files = model_files(model, config, str(source))
    adapt(model, solo, lora_config)
    train(model, solo, make_batch([9, 7]))
    optimizer = make_optimizer(model, OptimizerConfig(), solo.device)
    Saver({POLICY: Part(model, optimizer)}, solo, background=False).save(Progress(3), tmp_path / "checkpoint")
    hf_writer.publish_version(model, tmp_path / "published", files=files, dtype="float32", group=solo)
    export.export_checkpoint(
        tmp_path / "checkpoint", tmp_path / "out", config, str(source), step=3, adapters=lora_config
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "published").state_dict()
    start = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(tensor, published[name]) for name, tensor in exported.items())
    changed = {name.split(".")[-2] for name, tensor in exported.items() if not torch.equal(tensor, start[name])}
    assert changed == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")} | set(full)
    with pytest.raises(RoleError, match="belongs to another model than"):
        export.export_checkpoint(tmp_path / "checkpoint", tmp_path / "no", config, str(source), step=3)


def test_adapters_of_runs_train_independently(
    solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            train_step(
                model,
                optimizer,
                Update(make_batch([9, 7]), [(0, 1)]),
                group=solo,
                loss=Mixture(Objective("aipo")),
                lr=SMOOTH.lr,
                max_grad_norm=1.0,
            )

    runs = {"one": CONFIG, "two": CONFIG.model_copy(update={"alpha": 2.0})}
    expected = {}
    for seed, (name, config) in enumerate(runs.items()):
        alone = adapt(make_model(), solo, config, seed)
        trained(alone, make_optimizer(alone, OptimizerConfig(), solo.device), 4)
        expected[name] = parameters(alone)
    model = adapt(make_model(), solo)
    adapters, optimizers = Adapters(model), {}
    for seed, (name, config) in enumerate(runs.items()):
        adapters.load_run(name, config)
        lora.initialize_adapters(model, seed)
        optimizers[name] = make_optimizer(model, OptimizerConfig(), solo.device)
    for name, count in (("one", 1), ("two", 3), ("one", 3), ("two", 1)):
        adapters.load_run(name, runs[name])
        trained(model, optimizers[name], count)
    for name, config in runs.items():
        adapters.load_run(name, config)
        assert all(torch.equal(tensor, expected[name][key]) for key, tensor in parameters(model).items()), name


def test_lower_rank_equals_adapter_padded_with_zeros(
    tmp_path: Path, solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    narrow = CONFIG.model_copy(update={"rank": 3})
    alone = adapt(make_model(), solo, narrow, seed=5)
    model = adapt(make_model(), solo)
    Adapters(model).load_run("narrow", narrow)
    lora.initialize_adapters(model, 5)
    for one in (alone, model):
        train(one, solo, make_batch([9, 7]), optimizer_config=SMOOTH)
    for number, one in enumerate((alone, model)):
        hf_writer.publish_adapter(
            one,
            RunPaths(tmp_path).version(number, 1),
            config=lora.adapter_config(one, narrow, "base"),
            dtype="float32",
            group=solo,
        )
    expected, found = (load_file(RunPaths(tmp_path).version(n, 1) / "adapter_model.safetensors") for n in (0, 1))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)
    for layer in lora.layers_with_adapter(model).values():
        assert not local_part(layer.lora_A)[3:].any()
        assert not local_part(layer.lora_B)[:, 3:].any()


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())


def test_adapter_names_match_the_model_files() -> None:
    """Hunyuan 3 names its shared experts `shared_experts` in memory and `shared_mlp` in files; engines use the names
    of files.
    """
    whole = on_meta("hy_v3")
    model = small_model(type(whole), whole.config, attention="eager", seq_len=64, seed=0)
    remember_names(model)
    config = LoRAConfig(rank=2, targets=["shared_experts.up_proj", "q_proj"])
    lora.inject_adapters(model, config)
    names = sorted(name for name in lora.adapter_tensors(model) if ".1." in name)
    assert names == [
        f"base_model.model.model.layers.1.{layer}.lora_{half}.weight"
        for layer in ("mlp.shared_mlp.up_proj", "self_attn.q_proj")
        for half in "AB"
    ]
    assert "model.layers.1.mlp.shared_mlp.up_proj" in lora.adapter_config(model, config, "base")["target_modules"]


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("phimoe", "router"),  # a linear layer whose `forward` selects experts
        ("gemma3n_text", "altup.correction_coefs"),  # its owner reads its weight directly
    ],
)
def test_layers_that_bypass_forward_get_no_adapter(kind: str, without: str) -> None:
    model = on_meta(kind)
    assert any(name.endswith(without) for name, _ in model.named_modules())
    lora.inject_adapters(model, LoRAConfig(rank=2))
    names = [*lora.layers_with_adapter(model)]
    assert any(name.endswith("self_attn.q_proj") for name in names)
    assert not [name for name in names if name.endswith(without)]


def test_model_without_linear_layers_refuses_lora() -> None:
    with pytest.raises(RoleError, match=r"lora: GPT2LMHeadModel has no linear layers .*; remove lora"):
        lora.inject_adapters(on_meta("gpt2"), LoRAConfig(rank=2))


def test_part_of_fused_tensor_refuses_single_adapter() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, vocab_size=8)
    )
    joined = WeightConverter(
        ["mlp.gate_up.weight"], ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[Chunk(dim=0)]
    )
    model._weight_conversions = [joined]
    lora.inject_adapters(model, LoRAConfig(rank=2, targets=["gate_proj"]))
    with pytest.raises(
        RoleError, match=r"lora.targets: model.layers.0.mlp.gate_proj is another tensor .*remove it from lora.targets"
    ):
        lora.adapter_tensors(model)
