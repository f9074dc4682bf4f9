"""Sweep over architectures: `python -m tests.trainer.architectures FOLDER [TYPE...]` tests a small model of every type of
transformers with a class for causal language models or for images and text.

Each model is saved by transformers, loaded by the trainer, computed in packed rows, published and read again. Accepted
models are compared with transformers' eager attention in evaluation mode, one sequence at a time. The sweep takes about
five minutes of one core and writes its results (`benchmarks/results/architectures.json`, the source of
docs/reference/models.md) and their page (`architectures.md`) into the folder. With types it keeps the results of all
other types.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, GptOssConfig, GptOssForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlrun.config.families import training_refusal
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.fit.model_sources import UnknownModelError, auto_class, read_shape
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.modeling import lora, packed_attention
from rlrun.trainer.modeling.dequantize import write_plain_copy
from rlrun.trainer.modeling.flops import model_cost
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.noise import read_noise, set_noise
from rlrun.trainer.modeling.recurrent import packing_of
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from rlrun.trainer.proof.architecture_check import _make_row, find_fault
from rlrun.trainer.proof.small_models import LONGEST, quiet_transformers, small_model
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from tests.support.quantized_models import quantize_files

RESULTS = Path(__file__).parents[2] / "benchmarks/results/architectures.json"
ROW = (5, LONGEST, 9, 17)
"""Sequence lengths of the row, in tokens."""
WINDOW = 6
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size")
SECONDS = 120
"""Limit of CPU time per type, in seconds, so that other processes of the machine do not change results."""
LORA = LoRAConfig(rank=4)
_LONGEST_REASON = 160
_MXFP4_SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
"""A small GPT-OSS whose experts have whole groups of 32 numbers."""
_MIXED = ["conv", "conv", "full_attention"]
PAGE = """\
# Every language model of transformers

`python -m tests.trainer.architectures FOLDER`, transformers {version}: a small model of each of the {types} model types
that have a class for causal language models or for images and text, in float32 on a CPU.
{trained} are trained, {others} are not. A test compares this page with the installed transformers.
[Which models can be trained](../../docs/models.md) says how a run proves its model.

- Log-probability, gradient: largest difference of a row of several sequences ({row} tokens) from transformers' eager attention in
  evaluation mode with each sequence alone; in nats, and as a share of a parameter's gradient.
- With windows: the same with windows of {window} tokens, where the type has any; `refused` if it is not trained with them.
- Adapters: largest difference of a log-probability from the model with merged weights.
- Packing: rows with several sequences (`row`), with mixers once per sequence (`mixer`), or of one sequence (`alone`).
- Quantized: format of files whose projections were quantized (GPT-OSS: its experts), and which the trainer reads like their plain copy.
- Published: names and bits of the source's files, as transformers reads them.
- Work: active parameters as a share of the multiplications that torch counts for a token. Small models have parts that do not become small.
- Counted: parameters by `rlrun fit`, as a share of those of the model at full size.

| model type | packing | log-probability | gradient | with windows | gradient | adapters | quantized | published | work | counted |
|---|---|---|---|---|---|---|---|---|---|---|
{trained_rows}

Gemma 3n and 4 are 30 layers deep also when they are small; transformers' own two attentions, eager and SDPA, differ by as much.

| model type | not trained, since |
|---|---|
{other_rows}
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_routed_experts": 64, "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": _MIXED * 10 + _MIXED[1:]},
    "lfm2_moe": {"layer_types": _MIXED * 10 + _MIXED[1:]},
}
"""Changes to default configurations that match no published model."""


def whole_model(kind: str) -> Any:
    """Build the model of a type's default configuration on the meta device."""
    packed_attention.register_attention()
    with torch.device("meta"):
        config = CONFIG_MAPPING[kind](**OPTIONS.get(kind, {}))
        return auto_class(config).from_config(config)


def parts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for one in inner for part in parts_of(one))]


def save_published(whole: Any, source: Path, *, windows: bool) -> Tensor:
    """Save a small model in its published format, with the noise of its type and with active windows if `windows`;
    return token ids for it.
    """
    model: Any = small_model(type(whole), whole.config, attention="eager", seq_len=512, seed=3)
    set_noise(model.config, read_noise(whole.config))
    if windows:
        for part in parts_of(model.config.get_text_config()):
            for name in WINDOWS:
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, WINDOW)
    model.save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, len(model.get_input_embeddings().weight), (sum(ROW),), generator=generator)


def engines(source: Path) -> Any:
    """Load the saved model with transformers for evaluation."""
    kind = auto_class(AutoConfig.from_pretrained(source))
    return kind.from_pretrained(source, attn_implementation="eager", dtype=torch.float32).eval()


def compute_separately(model: Any, ids: Tensor) -> Tensor:
    """Return log-probabilities `[T]`, with one forward pass per sequence."""
    found = []
    for sequence in ids.split(ROW):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
        found += [chosen.new_zeros(1), chosen]
    return torch.cat(found)


def compute_rows(model: nn.Module, ids: Tensor) -> Tensor:
    """Return log-probabilities `[T]` of the trainer: of one row, or of rows of one sequence for packing `alone`."""
    rows = [(length,) for length in ROW] if packing_of(model) == "alone" else [ROW]
    parts = ids.split([sum(row) for row in rows])
    return torch.cat(
        [token_statistics(model, _make_row(part, row)).logprobs for part, row in zip(parts, rows, strict=True)]
    )


def gradients(model: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of the log-probabilities."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(2))
    (logprobs * weights).sum().backward()
    return {
        name: torch.zeros_like(local_part(one)) if one.grad is None else local_part(one.grad)
        for name, one in model.named_parameters()
    }


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference as a share of its parameter's norm."""
    least = 1e-3 * max(float(one.norm()) for one in expected.values())
    return max(
        float((found[name] - one).norm()) / max(float(one.norm()), least) if name in found else math.inf
        for name, one in expected.items()
    )


def files_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def exported(model: nn.Module, source: Path, folder: Path, group: Group) -> str:
    """Return `equal` if the published files have the source's names and bits and transformers reads them without
    changes.
    """
    files = model_files(model, ModelConfig(path=str(source)), str(source))
    hf_writer.publish_version(model, folder, files=files, dtype="float32", group=group)
    before, after = files_of(source), files_of(folder)
    if before.keys() != after.keys():
        return f"other names: {sorted(before.keys() ^ after.keys())[:3]}"
    if unequal := [name for name in before if not torch.equal(before[name], after[name])]:
        return f"other values: {unequal[:3]}"
    kind = auto_class(AutoConfig.from_pretrained(folder))
    read, report = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    if report["missing_keys"] or report["unexpected_keys"]:
        return f"missing {sorted(report['missing_keys'])[:3]}, unexpected {sorted(report['unexpected_keys'])[:3]}"
    own = engines(source).state_dict()
    wrong = [name for name, tensor in read.state_dict().items() if not torch.equal(tensor, own[name])]
    return f"read otherwise: {wrong[:3]}" if wrong else "equal"


def adapters(source: Path, group: Group, ids: Tensor) -> str:
    """Return the largest difference between a model with adapters and one with merged weights, and the adapters
    without gradient.
    """
    model = load_checked(
        ModelConfig(path=str(source)),
        str(source),
        group,
        seq_len=LONGEST,
        options=LoadOptions(prepare=lambda model: lora.inject_adapters(model, LORA)),
    )
    lora.initialize_adapters(model, 0)
    for number, layer in enumerate(lora.layers_with_adapter(model).values()):
        lora.fill_parameter(
            layer.lora_B, 0.1 * torch.randn(layer.lora_B.shape, generator=torch.Generator().manual_seed(number))
        )
    logprobs = compute_rows(model, ids)
    found = gradients(model, logprobs)
    merged = engines(source)
    state = dict(merged.named_parameters())
    with torch.no_grad():
        for name, update in lora.weight_updates(model).items():
            state[name].copy_(
                lora.merge_adapter(state[name], local_part(update.a), local_part(update.b), update.scaling)
            )
        error = float((logprobs - compute_separately(merged, ids)).abs().max())
    lora.adapter_tensors(model)
    idle = [name for name, one in model.named_parameters() if one.requires_grad and not found[name].any()]
    return f"{error:.0e}" + (f", without gradient: {idle[:3]}" if idle else "")


def read_quantized(source: Path, group: Group) -> str:
    """Quantize the files of a small model, load them like a reference, and return the format if every parameter equals that of the
    dequantized files, bit for bit.
    """
    method, endings = "fp8", _projections(source)
    if json.loads((source / "config.json").read_text())["model_type"] == "gpt_oss":
        method, endings = "mxfp4", ("experts.gate_up_proj", "experts.down_proj")
        source = source.with_name("wide")
        GptOssForCausalLM(GptOssConfig(**_MXFP4_SIZES)).save_pretrained(source)
    if not quantize_files(source, method, endings, (64, 64)):
        return "none"
    plain = source.parent / "plain"
    write_plain_copy(source, plain, "float32")
    own, expected = (
        load_checked(ModelConfig(path=str(folder)), str(folder), group, seq_len=LONGEST).state_dict()
        for folder in (source, plain)
    )
    wrong = [name for name, tensor in own.items() if not torch.equal(local_part(tensor), local_part(expected[name]))]
    return f"other values: {wrong[:3]}" if wrong else method


def _projections(source: Path) -> tuple[str, ...]:
    """Return the names of the matrices in the files that authors quantize: projections, also of experts."""
    return tuple(name for name, tensor in files_of(source).items() if tensor.ndim == 2 and name.endswith("proj.weight"))


def work(model: Any, source: Path) -> str:
    """Return the active parameters as a share of the multiplications that torch counts for one token."""
    other = engines(source)
    with contextlib.suppress(Exception):
        other.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        other(input_ids=torch.tensor([[5]]), use_cache=False)
    return f"{2 * model_cost(model).active_parameters / counter.get_total_flops():.2f}"


def count_share(whole: Any, folder: Path) -> str:
    """Return the parameter count of `rlrun fit` for the full-size model as a share of its real count."""
    whole.config.save_pretrained(folder)
    shape = read_shape(folder, "spec.model.path", option="--model-config")
    return f"{shape.parameters / sum(one.numel() for one in whole.parameters()):.4f}"


def guarded(act: Callable[..., str], *options: Any) -> str:
    """Return the result of one model type: its numbers, the reason of its refusal, or its error."""
    try:
        return act(*options)
    except (RoleError, UnknownModelError) as error:
        return f"refused: {error}"
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return f"CRASH {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def compared(source: Path, ids: Tensor, group: Group) -> tuple[nn.Module, dict[str, Any]]:
    """Return the trainer's model and its largest differences from transformers' model."""
    model = load_checked(ModelConfig(path=str(source)), str(source), group, seq_len=LONGEST)
    logprobs = compute_rows(model, ids)
    found, other = gradients(model, logprobs), engines(source)
    expected = compute_separately(other, ids)
    error = float((logprobs - expected).detach().abs().max())
    return model, {
        "packing": packing_of(model),
        "logprob": error,
        "gradient": gradient_error(found, gradients(other, expected)),
    }


def examine_type(kind: str, folder: Path, group: Group) -> dict[str, Any]:
    """Return all results of a type."""
    try:
        whole = whole_model(kind)
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            return {"refused": f"transformers {transformers.__version__} has no causal language model of this type"}
        return {"unmade": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    refusal = training_refusal(whole.config.to_dict(), kind)
    if refusal is not None and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return {"refused": refusal, "by_config": True}
    remember_names(whole)
    if (fault := guarded(lambda: find_fault(whole, seq_len=512) or "")) and not fault.startswith("CRASH"):
        return {"refused": fault}
    source = folder / "source"
    try:
        ids = save_published(whole, source, windows=False)
        model, found = compared(source, ids, group)
    except RoleError as error:
        return {"refused": str(error).replace(f"model {source}: ", "")}
    found["export"] = guarded(exported, model, source, folder / "version", group)
    found["lora"] = guarded(adapters, source, group, ids)
    found["work"] = guarded(work, model, source)
    found["fit"] = guarded(count_share, whole, folder / "full").replace(f"{folder}/", "")
    if any(
        isinstance(getattr(part, name, None), int)
        for part in parts_of(whole.config.get_text_config())
        for name in WINDOWS
    ):
        ids = save_published(whole, folder / "windows", windows=True)
        try:
            found["windows"] = compared(folder / "windows", ids, group)[1]
        except RoleError as error:  # Llama 4's chunks
            found["windows"] = {"logprob": "refused", "gradient": "refused"}
            print(error, file=sys.stderr)
    found["quantized"] = guarded(read_quantized, source, group)
    # By the class: the encoder of Gemma 4 is absent from its default configuration, but not from its repositories.
    found["text_of"] = type(whole).__name__.endswith("ForConditionalGeneration")
    return found | ({"by_config": True} if refusal is not None else {})


def _show_error(error: float | str) -> str:
    return error if isinstance(error, str) else f"{error:.0e}"


def row_of(kind: str, found: dict[str, Any]) -> str:
    """Return the row of a trained type."""
    windows = found.get("windows", {})
    errors = [_show_error(one[name]) if one else "" for one in (found, windows) for name in ("logprob", "gradient")]
    adapters = re.sub(r"refused: .*", "none", found["lora"])
    counted = re.sub(r"refused: .*", "not counted", found["fit"])
    cells = [
        f"`{kind}`",
        found["packing"],
        *errors,
        adapters,
        found["quantized"],
        found["export"],
        found["work"],
        counted,
    ]
    return f"| {' | '.join(cells)} |".replace("e-0", "e-").replace("0e+00", "0")


def reason_of(found: dict[str, Any]) -> str:
    """Return the reason why a type is not trained, without its number, which differs between runs."""
    if "unmade" in found:
        return f"no model can be made of its defaults: {found['unmade']}"
    reason = re.sub(r"^.*?cannot be trained: | \(on a small model .*", "", found["refused"])
    return re.sub(r", so that log-prob.*| by [\d.e+-]+ .*", "", reason).replace("|", " ")[:_LONGEST_REASON]


def page(table: dict[str, Any]) -> str:
    """Return the page of results."""
    trained = {kind: row for kind, row in sorted(table.items()) if "logprob" in row}
    others = {kind: row for kind, row in sorted(table.items()) if kind not in trained}
    return PAGE.format(
        version=transformers.__version__,
        types=len(table),
        trained=len(trained),
        others=len(others),
        row=", ".join(map(str, ROW)),
        window=WINDOW,
        trained_rows="\n".join(row_of(kind, row) for kind, row in trained.items()),
        other_rows="\n".join(f"| `{kind}` | {reason_of(row)} |" for kind, row in others.items()),
    )


def examined_types() -> list[str]:
    """Return every type of transformers with a class for causal language models or for images and text."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def read_results() -> dict[str, Any]:
    """Return the stored results of all types."""
    types: dict[str, Any] = json.loads(RESULTS.read_text())["types"]
    return types


def main(folder: Path, kinds: Sequence[str]) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    table: dict[str, Any] = read_results() if kinds else {}

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of CPU time")

    signal.signal(signal.SIGPROF, late)
    for kind in kinds or examined_types():
        with quiet_transformers(), tempfile.TemporaryDirectory(dir=folder) as own:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                table[kind] = examine_type(kind, Path(own), group)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                table[kind] = {"crash": f"{type(error).__name__}: {error}"}
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(kind, json.dumps(table[kind]), flush=True)
        content = {"transformers": transformers.__version__, "types": dict(sorted(table.items()))}
        (folder / "architectures.json").write_text(json.dumps(content, indent=1) + "\n")
    if broken := [kind for kind, row in table.items() if "CRASH" in json.dumps(row) or "crash" in row]:
        print("broken:", *broken)
        return 1
    (folder / "architectures.md").write_text(page(table))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
