"""Hybrid models: packed rows equal separate sequences, in every activation mode and compiled, and a crossing state is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.batch_step import Steps
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.learner import make_learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import bind_objective
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import shard as model_module
from rlrun.trainer.modeling.load_weights import LoadOptions, Support
from rlrun.trainer.modeling.recurrent import Packing, find_mixers, packing_of
from rlrun.trainer.modeling.shard import Memory, decoder_layers, local_part
from rlrun.trainer.modeling.shared_model import load_policy
from rlrun.trainer.proof import architecture_check
from rlrun.trainer.proof.architecture_check import LENGTHS, LOGPROB_LIMIT, Verdict, check_architecture, examine_model
from rlrun.trainer.proof.start_check import check_model, load_checked
from rlrun.trainer.ranks.group import Group, ParallelDims
from tests.support.sets import few_in_gate
from tests.trainer import architectures

CPU = torch.device("cpu")
MIXERS = (
    *(
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
        "nemotron_h",
        "kimi_linear",
        "lfm2",
        "jamba",
        "bamba",
        "falcon_h1",
    ),
    *("minimax", "mamba2", "olmo_hybrid", "granitemoehybrid", "recurrent_gemma", "qwen3_5", "lfm2_moe", "mamba"),
    "falcon_mamba",
)
GATE = ("qwen3_5_text", "nemotron_h", "lfm2", "mamba2")
"""A delta rule, a scan, a short convolution without a scan, and a model that does not pass the row to its layers."""
ALONE = ("zaya", "llama4")
LIMIT = 1e-4
GRADIENT_LIMIT = 1e-5
MODES = ("none", "selective", "attention", "full", "offload")


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that saves a small model of a type with a tokenizer, and returns the folder."""

    def make(kind: str) -> str:
        folder = tmp_path / kind
        architectures.save_published(architectures.whole_model(kind), folder, windows=False)
        return str(folder)

    return make


def load(folder: str, group: Group, **memory: Any) -> Any:
    options = LoadOptions(memory=Memory(**memory))
    return load_checked(ModelConfig(path=folder), folder, group, seq_len=32, options=options)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_part(one.grad).clone() for name, one in model.named_parameters() if one.grad is not None}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a gradient as a share of its norm, and of the largest norm for gradients near 0."""
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(one.norm()) for one in expected.values())
    return max(float((found[name] - one).norm()) / max(float(one.norm()), least) for name, one in expected.items())


@pytest.mark.parametrize("kind", few_in_gate(MIXERS, GATE))
def test_packed_row_of_hybrid_equals_separate_sequences(
    kind: str, make_folder: Callable[[str], str], solo: Group
) -> None:
    folder = make_folder(kind)
    model = load(folder, solo)
    assert packing_of(model) == "mixer"
    mixers = [mixer for layer in decoder_layers(model) for mixer in find_mixers(layer)]
    assert mixers, "a small model without mixers proves nothing"
    calls: list[nn.Module] = []
    for mixer in mixers:
        mixer.register_forward_hook(lambda module, *_: calls.append(module))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, len(model.get_input_embeddings().weight), (sum(architectures.ROW),), generator=generator)
    logprobs = architectures.compute_rows(model, ids)
    assert set(calls) == set(mixers)
    engine = architectures.engines(Path(folder))
    expected = architectures.compute_separately(engine, ids)
    assert float((logprobs - expected).detach().abs().max()) <= LIMIT
    found = architectures.gradients(model, logprobs)
    assert architectures.gradient_error(found, architectures.gradients(engine, expected)) <= 1e-3


def examine_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    monkeypatch.setattr(architecture_check, "_found", {})
    return examine_model(architectures.whole_model(kind), seq_len=512)


@pytest.mark.parametrize("kind", few_in_gate(ALONE, ("llama4",)))
def test_model_without_known_mixers_gets_rows_of_one_sequence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = examine_kind(kind, monkeypatch)
    assert (verdict.fault, verdict.packing) == (None, "alone")
    assert "sequences in one row influence each other" in verdict.reason
    assert "no recurrent mixer of a known kind" in verdict.reason


def split_convolution(hidden: Tensor, *inputs: Any, compute: Any, **options: Any) -> Tensor:
    parts = hidden.split(LENGTHS, 2) if hidden.shape[2] == sum(LENGTHS) else [hidden]
    return torch.cat([compute(part, *inputs, **options) for part in parts], 2)


def split_scan(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, compute: Any, **options: Any
) -> Any:
    if query.shape[1] != sum(LENGTHS):
        return compute(query, key, value, g=g, beta=beta, **options)
    pieces = zip(*(one.split(LENGTHS, 1) for one in (query, key, value, g, beta)), strict=True)
    outputs = [compute(q, k, v, g=decay, beta=rate, **options)[0] for q, k, v, decay, rate in pieces]
    return torch.cat(outputs, 1), None


@pytest.mark.parametrize("divided", [(), ("convolution",), ("scan",), ("convolution", "scan")])
def test_state_that_crosses_in_convolution_or_scan_is_found(
    divided: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if both parts of a mixer are divided, the whole row passes without divided mixers."""
    functions = {
        "convolution": ("causal_conv1d_fn", split_convolution),
        "scan": ("torch_chunk_gated_delta_rule", split_scan),
    }
    for part in divided:
        name, split = functions[part]
        monkeypatch.setattr(modeling_qwen3_5, name, partial(split, compute=getattr(modeling_qwen3_5, name)))
    verdict = examine_kind("qwen3_5_text", monkeypatch)
    assert verdict.packing == ("row" if len(divided) == 2 else "mixer")
    if verdict.packing == "mixer":
        error = float(verdict.reason.partition("differ by ")[2].split()[0])
        assert error > 100 * LOGPROB_LIMIT, "a crossing state must be far above the limit"


def test_mixer_that_is_not_called_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model whose mixers are bypassed must not prove that divided mixers are right."""
    divide = architecture_check.divide_mixers
    monkeypatch.setattr(architecture_check, "divide_mixers", lambda layers: [*divide(layers), nn.Identity()])
    verdict = examine_kind("lfm2", monkeypatch)
    assert verdict.packing == "alone"
    assert "mixers were not called" in verdict.reason


def two_rows(make_sample: Callable[..., Sample]) -> list[Any]:
    rows = [[make_sample(9), make_sample(13, seed=1), make_sample(1, prompt=1)], [make_sample(20), make_sample(3)]]
    return [micro_batch(row, CPU) for row in rows]


@pytest.mark.parametrize(
    "kind", few_in_gate(("qwen3_5_text", "nemotron_h", "lfm2", "mamba2"), ("qwen3_5_text", "mamba2"))
)
def test_recomputation_of_hybrid_uses_its_own_row(
    kind: str, make_folder: Callable[[str], str], make_sample: Callable[..., Sample], solo: Group
) -> None:
    """Two rows are computed before the first backward pass, as in a pipeline."""
    folder = make_folder(kind)
    found = {}
    for mode in MODES:
        model = load(folder, solo, activations=mode)
        losses = [token_statistics(model, row).logprobs.square().sum() for row in two_rows(make_sample)]
        for loss in losses:
            loss.backward()
        found[mode] = gradients_of(model)
    for mode in MODES[1:]:
        assert largest_error(found[mode], found["none"]) <= GRADIENT_LIMIT, mode


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Trace compiled layers without lowering, and return a function that counts graphs."""
    monkeypatch.setattr(model_module.torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(model_module, "has_compiler", lambda: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_hybrid_has_no_graph_per_set_of_lengths(
    mode: str,
    make_folder: Callable[[str], str],
    make_sample: Callable[..., Sample],
    solo: Group,
    traced: Callable[[], int],
) -> None:
    folder, found = make_folder("qwen3_5_text"), []
    for compiled in (False, True):
        model = load(folder, solo, compile=compiled, activations=mode)
        graphs = []
        for lengths in ([9, 14], [20, 5, 7], [2, 2, 30, 2]):
            row = micro_batch([make_sample(length, seed=index) for index, length in enumerate(lengths)], CPU)
            token_statistics(model, row).logprobs.square().sum().backward()
            graphs.append(traced())
        found.append(gradients_of(model))
    assert graphs[0] > 0
    assert graphs[2] == graphs[1], "rows of other lengths made a graph"
    assert largest_error(found[1], found[0]) <= GRADIENT_LIMIT


def make_steps(folder: str, group: Group, packing: Packing | None, **changes: Any) -> Steps:
    """Return the steps of a run; `packing` replaces the packing of the start check."""
    config = TrainerConfig(
        name="test",
        uid="uid",
        output_dir=folder,
        model=changes.pop("model", ModelConfig(path=folder, dtype="float32")),
        max_steps=3,
        seq_len=32,
        micro_batch_tokens=32,
        seed=0,
        algorithm=changes.pop("algorithm", AlgorithmConfig()),
        # The first step of AdamW turns the rounding of a gradient near zero into a step of full size; that of SGD does not.
        optimizer=OptimizerConfig(name="sgd", lr=0.005),
        checkpoint=CheckpointConfig(),
        **changes,
    )

    def check(model: Any, source: str, ranks: Group, seq_len: int) -> Support:
        found = check_model(model, source, ranks, seq_len)
        return found if packing is None else Support(found.features, packing)

    policy = load_policy(config, folder, group, with_weights=True, check=check)
    optimizer = make_optimizer(policy.module, config.optimizer, group.device)
    loss = bind_objective(config)
    learner = make_learner(config, policy.module, optimizer, loss, source=folder, group=group, check=check)
    return Steps(config, policy, learner)


def test_rows_of_one_sequence_train_like_divided_mixers(
    make_folder: Callable[[str], str], make_batch: Callable[..., Batch], solo: Group
) -> None:
    folder, losses, lines = make_folder("qwen3_5_text"), [], list[str]()
    sink = logger.add(lines.append, format="{message}", level="INFO")
    for packing in (None, "alone"):
        steps = make_steps(folder, solo, packing)
        batches = [make_batch([9, 4, 13, 6, 3], step=step) for step in (1, 2, 3)]
        sizes = [len(row) for row in steps.divide_batch(batches[0])[0].rows]
        assert sizes == [1] * 5 if packing == "alone" else len(sizes) == 2
        losses.append([steps.train(batch.step, batch, lambda: None)["loss"] for batch in batches])
    logger.remove(sink)
    # Measured: 1e-7 with AVX-512, 2e-6 with the oldest kernels, whose first losses differ by 4e-7 already.
    assert losses[0] == pytest.approx(losses[1], abs=5e-6)
    assert len(set(losses[0])) == 3
    text = "".join(lines)
    assert "Qwen3_5ForCausalLM: packing mixer: sequences in one row influence each other" in text
    assert (
        "packing alone: the first batch has 5 sequences in 5 rows, 7 tokens per row; shared rows of 32 tokens would be 2"
        in text
    )


def test_row_of_several_sequences_is_refused_by_a_model_with_rows_of_one(
    make_folder: Callable[[str], str], make_sample: Callable[..., Sample], solo: Group
) -> None:
    folder = make_folder("lfm2")
    steps = make_steps(folder, solo, "alone")
    with pytest.raises(
        ValueError, match=r"a row has 2 sequences, but sequences of .*Lfm2ForCausalLM influence each other"
    ):
        token_statistics(steps._policy.module, micro_batch([make_sample(5), make_sample(6)], CPU))


def test_adapters_of_hybrid_train_projections_only(
    make_folder: Callable[[str], str], make_batch: Callable[..., Batch], solo: Group
) -> None:
    folder = make_folder("qwen3_5_text")
    steps = make_steps(folder, solo, None, lora=LoRAConfig(rank=2))
    trained = [name for name, one in steps._policy.module.named_parameters() if one.requires_grad]
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
        assert any(f"linear_attn.{part}.lora_A" in name for name in trained), part
    assert not [name for name in trained if any(part in name for part in ("conv1d", "A_log", "dt_bias"))]


@pytest.mark.parametrize("field", ["cp", "pp", "tp"])
def test_ranks_cannot_share_rows_or_layers_of_hybrid(field: str, solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = ParallelDims.from_config(ParallelismConfig(**{field: 2}), 2)
    monkeypatch.setattr(Group, "dims", dims)
    with pytest.raises(
        RoleError, match=rf"trainer\.parallelism\.{field} \(2\) is not supported for Lfm2.*set {field}: 1"
    ) as caught:
        check_architecture(architectures.whole_model("lfm2"), "m", solo, seq_len=64)
    assert caught.value.code == exit_codes.CONFIGURATION


def test_stages_of_model_with_rows_of_one_sequence_are_refused_only_for_recurrent_layers(
    solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "dims", ParallelDims.from_config(ParallelismConfig(pp=2), 2))
    with pytest.raises(RoleError, match=r"trainer\.parallelism\.pp \(2\) is not supported for Zaya.*set pp: 1"):
        check_architecture(architectures.whole_model("zaya"), "m", solo, seq_len=64)
    model = architectures.whole_model("llama4_text")
    assert check_architecture(model, "m", solo, seq_len=64).packing == "alone"
