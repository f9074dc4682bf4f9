"""The page of all model types, from the results of the sweeps over transformers and vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.docs_resource import NOTE, cells, page

_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SERVED_LIMIT = 1e-4
"""Largest difference of a log-probability between vLLM and the trainer that rounding explains, in nats."""
_LONGEST_REASON = 100
_MISTRAL = (
    *("Mistral v1", "Mistral v3, of Axolotl", "Mistral v3 Tekken, of Axolotl", "Mistral v7 Tekken, of Axolotl"),
    *("Mistral v3", "Mistral v3 Tekken", "Mistral v7", "Mistral v7 Tekken"),
)
_QWEN_3_5 = ("Qwen 3.5, thinking", "Qwen 3.5, not thinking", "Qwen 3.6", "Qwen 3.8")
TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "cohere": ("Cohere 1",),
    "cohere2": ("Cohere 2", "Command A"),
    "deepseek_v3": ("DeepSeek V3, thinking",),
    "exaone4": ("EXAONE 4",),
    "falcon_h1": ("Falcon H1",),
    "gemma2": ("Gemma 2",),
    "gemma3": ("Gemma 3",),
    "gemma3_text": ("Gemma 3",),
    "gemma4": ("Gemma 4, first template", "Gemma 4, second template", "Gemma 4, fifth template"),
    "glm4_moe": ("GLM 4.5",),
    "gpt_oss": ("GPT-OSS (Harmony)",),
    "jamba": ("Jamba",),
    "lfm2": ("LFM 2", "LFM 2.5"),
    "llama": ("Llama 3", "Llama 3.1", "Llama 3.2", "DeepSeek R1, distilled"),
    "llama4": ("Llama 4",),
    "mistral": _MISTRAL,
    "mistral3": ("Mistral v11", "Mistral v13"),
    "mixtral": ("Mistral v1",),
    "nemotron_h": ("Nemotron 3 Nano", "Nemotron 3 Super", "Nemotron 3 Ultra"),
    "phi3": ("Phi 3", "Phi 3.5", "Phi 4 reasoning"),
    "qwen2": ("Qwen 2.5", "DeepSeek R1, distilled"),
    "qwen3": ("Qwen 3", "Qwen 3-2507"),
    "qwen3_5": _QWEN_3_5,
    "qwen3_moe": ("Qwen 3", "Qwen 3-2507"),
}
"""Chat templates of published models of a type, by their names in the table of docs/models.md, where a test plays each of them."""


def read_results(name: str) -> dict[str, Any]:
    """Return the content of a sweep's results: versions of packages, and `types` with the result of each model type.

    Args:
        name: name of the file without `.json`.
    """
    content: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text())
    return content


def is_trained(found: Mapping[str, Any]) -> bool:
    """Return whether a type's result is that of a trained type, whose repositories no check of `config.json` refuses."""
    return "logprob" in found and not found.get("by_config")


def models_page() -> str:
    """Return the page of all model types."""
    sweep, engines = read_results("architectures"), read_results("in_vllm")
    trained = {kind: found for kind, found in sweep["types"].items() if is_trained(found)}
    refused = {kind: found for kind, found in sweep["types"].items() if kind not in trained}
    lines = [
        NOTE,
        "",
        "# Model types",
        "",
        f"All {len(sweep['types'])} types of transformers {sweep['transformers']} with a class for causal language models or for",
        f"images and text: {len(trained)} are trained, {len(refused)} are refused. Each type was tried with a small model of its default",
        "configuration, in float32 on a CPU. [Models](../models.md) explains the check that each run makes, and has a summary.",
        "",
        "## Trained types",
        "",
        "- Rows: `row` has several sequences; with `mixer` each recurrent mixer runs once per sequence of a row; `alone` has one",
        "  sequence ([packing](../models.md#hybrid-models)). The number is the largest difference of a log-probability from",
        "  transformers, in nats.",
        f"- Served: class of vLLM {engines['vllm']} on a CPU, and the largest difference of its log-probabilities from the trainer's,",
        f"  before and after a weight update. If it is above {SERVED_LIMIT:g} (bold), compare `mismatch_kl` of a run first. The",
        "  [results](../../benchmarks/results/in_vllm.md) have the details. GPUs have other kernels.",
        "- Quantized source: format of small files that the trainer read like their plain copy, bit for bit; empty: not tried.",
        "- Text of a vision class: the repository has an encoder, which stays frozen.",
        "- Conversations: templates that a test plays ([table](../models.md#conversations)); empty: no template was played.",
        "",
        "| model type | rows | served on a CPU | quantized source | text of a vision class | conversations |",
        "|---|---|---|---|---|---|",
        *(_trained_row(kind, found, engines["types"].get(kind)) for kind, found in trained.items()),
        "",
        "## Refused types",
        "",
        "`config.json`: `rlrun validate`, `fit` and each role refuse a repository by this file, before weights are fetched. Start: the",
        "model fails the check at the start, which `rlrun validate` and `local` also make for a folder on the same machine.",
        "",
        "| model type | refused by | reason |",
        "|---|---|---|",
        *(_refused_row(kind, found) for kind, found in refused.items()),
    ]
    return page(lines)


def _trained_row(kind: str, found: Mapping[str, Any], served: Mapping[str, Any] | None) -> str:
    quantized = found.get("quantized", "")
    return cells(
        f"`{kind}`",
        f"{found['packing']}, {show_error(found['logprob'])}",
        _served_cell(served),
        {"fp8": "FP8", "mxfp4": "MXFP4"}.get(quantized, ""),
        "yes" if found["text_of"] else "",
        "; ".join(TEMPLATES.get(kind, ())),
    )


def _served_cell(served: Mapping[str, Any] | None) -> str:
    if served is None:
        return "not tried"
    if "failed" in served:
        return f"no: {_shorten(served['failed'])}"
    error = max(served["first"], served["second"])
    shown = f"`{served['class']}`, {show_error(error)}"
    return f"**{shown}**" if error > SERVED_LIMIT else shown


def _refused_row(kind: str, found: Mapping[str, Any]) -> str:
    if found.get("by_config"):
        return cells(f"`{kind}`", "`config.json`", "images or sound: the type is not among the supported ones")
    if "unmade" in found:
        return cells(f"`{kind}`", "start", f"transformers builds no model of its defaults: {_shorten(found['unmade'])}")
    reason = re.sub(r"^.*?cannot be trained: | \(on a small model .*", "", found["refused"])
    return cells(f"`{kind}`", "start", _shorten(re.sub(r", so that log-prob.*| by [\d.e+-]+ .*", "", reason)))


def show_error(error: float) -> str:
    """Return an error with one digit: `3e-6`, or `0`."""
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e+")


def _shorten(text: str) -> str:
    line = " ".join(text.replace("|", " ").split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON].rstrip()} ..."
