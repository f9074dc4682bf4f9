"""Layouts that do not match a model's sizes, and their findings in `rlrun validate`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.fit.architecture import KNOWN, Architecture, from_config
from rlrun.fit.layout import layout_problems
from rlrun.local.model_sizes import size_findings

QWEN3, QWEN2, MIXTURE = KNOWN["Qwen/Qwen3-0.6B"], KNOWN["Qwen/Qwen2.5-7B"], KNOWN["Qwen/Qwen3-30B-A3B"]


def spec(**blocks: Any) -> RLRunSpec:
    return RLRunSpec.model_validate({"model": {"name": "a/b"}, "environments": [{"id": "gsm8k"}]} | blocks)


def trainer(gpus: int, **parallelism: int) -> dict[str, Any]:
    return {"trainer": {"gpusPerReplica": gpus, "parallelism": parallelism}}


@pytest.mark.parametrize(
    ("model", "blocks", "key", "message"),
    [
        (QWEN3, trainer(16, tp=16), "tp", r"16 must divide the model's key-value heads \(8\); lower tp"),
        (
            dataclasses.replace(QWEN2, model_type="gpt_oss"),
            trainer(2, tp=2),
            "tp",
            "2 is supported for the model types afmoe, .* is of type gpt_oss: its experts .* set tp: 1 and share it by dpShard, or cp",
        ),
        (
            dataclasses.replace(QWEN2, model_type="mamba"),
            trainer(2, cp=2),
            "cp",
            "type mamba: its layers carry state along a sequence; set cp: 1 and share it by dpShard",
        ),
        (
            dataclasses.replace(MIXTURE, model_type="granitemoe"),
            trainer(2, ep=2),
            "ep",
            "is supported for the model types .*olmoe, ",
        ),
        (
            dataclasses.replace(QWEN2, model_type="lfm2"),
            trainer(2, pp=2),
            "pp",
            "2 is not supported for models of type lfm2, whose layers carry state along a sequence; set pp: 1 and share it by dpShard",
        ),
        (QWEN3, trainer(32, pp=32), "pp", r"32 is higher than the number of the model's layers \(28\); lower pp"),
        (
            QWEN3,
            trainer(2, pp=2) | {"algorithm": {"preset": "ppo", "critic": {}}},
            "pp",
            r"2 does not work with algorithm\.critic, .*set pp: 1",
        ),
        (QWEN3, trainer(2, ep=2), "ep", "2 needs a model with experts, but the model has no experts; set ep: 1"),
        (MIXTURE, trainer(24, ep=3), "ep", r"3 times tp \(1\) must divide the model's experts \(128\)"),
        (
            dataclasses.replace(MIXTURE, experts=6),
            trainer(4, tp=4),
            "tp",
            r"4 times ep \(1\) must divide the model's experts \(6\); lower ep or tp",
        ),
        (
            dataclasses.replace(MIXTURE, dense_widths=(1023,)),
            trainer(2, tp=2),
            "tp",
            r"2 must divide the model's intermediate size \(1023\)",
        ),
        (
            QWEN3,
            {"trainer": {"gpusPerReplica": 2, "compile": True, "parallelism": {"tp": 2}}},
            "compile",
            r"true does not work with trainer\.parallelism\.tp \(2\), .*set compile: false or tp: 1",
        ),
        (
            QWEN3,
            {"trainer": {"gpusPerReplica": 2, "attention": "cudnn", "parallelism": {"cp": 2}}},
            "attention",
            r"cudnn: .* has rows that ranks share \(parallelism\.cp\), which cudnn does not support; set attention: auto",
        ),
        (
            QWEN3,
            {"inference": {"tensorParallel": 3}},
            "tensor_parallel",
            r"3 must divide the model's attention heads \(16\)",
        ),
    ],
)
def test_invalid_layout_is_refused_with_field(
    model: Architecture, blocks: dict[str, Any], key: str, message: str
) -> None:
    ((found, said),) = layout_problems(spec(**blocks), model, None)
    assert found[-1] == key
    assert re.search(message, said), said


def test_valid_layout_has_no_problems() -> None:
    assert not [*layout_problems(spec(**trainer(8, tp=2, cp=2)), QWEN3, QWEN3)]
    assert not [*layout_problems(spec(**trainer(8, ep=8)), MIXTURE, None)]
    assert not [*layout_problems(spec(**trainer(8, pp=2)), QWEN2, None)]


def test_multimodal_model_allows_parallelism_of_trainer() -> None:
    """The trainer refuses Gemma 3 with images; it divides only the text model."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = {"model_type": "gemma3_text", "intermediate_size": 128, "vocab_size": 100} | sizes
    with_images = from_config({"model_type": "gemma3", "text_config": text})
    for field in ("tp", "cp"):
        run = spec(**trainer(2, **{field: 2}), inference={"maxModelLen": 2048})
        ((key, said),) = layout_problems(run, with_images, None)
        assert key == ("trainer", "parallelism", field)
        assert said.startswith("2 is supported for the model types ")
        assert said.endswith("the model is of type gemma3; set " + field + ": 1 and share it by dpShard")
        assert not [*layout_problems(run, from_config(text), None)]


def test_reference_model_is_divided_as_the_policy() -> None:
    run = spec(**trainer(8, tp=8), algorithm={"preset": "distill", "reference": {"model": "a/c"}})
    own = dataclasses.replace(QWEN3, kv_heads=4)
    ((key, said),) = layout_problems(run, QWEN3, own)
    assert key == ("trainer", "parallelism", "tp")
    assert said == ("8, which also divides algorithm.reference, must divide the model's key-value heads (4); lower tp")
    assert len([*layout_problems(run, own, own)]) == 1, "of the same model once"


@pytest.mark.parametrize(
    ("product", "asked", "fault"),
    [
        (
            "NVIDIA-A100-SXM4-80GB",
            "fa3",
            "fa3: it needs a GPU of compute capability 9.x, but this is NVIDIA-A100-SXM4-80GB",
        ),
        ("NVIDIA-H100-80GB-HBM3", "fa3", None),
        (None, "fa3", None),
        ("Tesla-T4", "auto", None),
    ],
)
def test_unsupported_attention_kernel_of_gpu_is_refused(product: str | None, asked: str, fault: str | None) -> None:
    run = spec(trainer={"gpusPerReplica": 1, "attention": asked})
    found = [message for _, message in layout_problems(run, QWEN3, None, product=product)]
    assert [message.startswith(fault or "-") for message in found] == [True] * (fault is not None)


def test_teacher_vocabulary_must_equal_policy_vocabulary() -> None:
    run = spec(algorithm={"preset": "distill", "reference": {"model": "a/c"}})
    ((key, said),) = layout_problems(run, QWEN3, QWEN2)
    assert key == ("algorithm", "reference", "model")
    assert "152,064" in said
    assert "151,936" in said


def test_sequence_length_is_limited_by_positions() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 1024}
    short = from_config(config)
    assert [key for key, _ in layout_problems(spec(seqLen=2048), short, None)] == [("seq_len",)]
    longer = {"seqLen": 1024, "inference": {"maxModelLen": 2048}}
    assert [key for key, _ in layout_problems(spec(**longer), short, None)] == [("inference", "max_model_len")]
    assert not [*layout_problems(spec(seqLen=1024), short, None)]
    unknown = from_config(config | {"max_position_embeddings": "many"})
    assert not [*layout_problems(spec(seqLen=2048), unknown, None)]
    stretched = from_config(config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert not [*layout_problems(spec(seqLen=2048), stretched, None)]


def test_size_findings_require_known_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    for model in ({"name": "team/unknown"}, {"path": str(tmp_path)}):
        assert not [*size_findings(spec(model=model, **trainer(3, tp=3)), ())]
    known = {"model": {"name": "Qwen/Qwen3-0.6B"}, **trainer(3, tp=3)}
    assert [(found.key, found.notice) for found in size_findings(spec(**known), ())] == [
        (("trainer", "parallelism", "tp"), False)
    ]
    assert not [*size_findings(spec(**known), [("model", "name")])]


def test_oversized_run_on_known_gpu_gives_notice() -> None:
    model = {"model": {"name": "Qwen/Qwen3-8B"}, **trainer(1)}
    assert not [*size_findings(spec(**model), ())]
    assert not [*size_findings(spec(**model, placement={"gpuProduct": "NVIDIA-X1"}), ())]
    (found,) = size_findings(spec(**model, placement={"gpuProduct": "NVIDIA-L4"}), ())
    assert found.notice
    assert found.key == ("trainer",)
    assert "`rlrun fit`" in found.message


def test_minimum_pods_of_elastic_trainer_must_fit() -> None:
    pods = {"replicas": 32, "gpusPerReplica": 1, "activationCheckpointing": "full"}
    base = {"model": {"name": "Qwen/Qwen3-8B"}, "placement": {"gpuProduct": "NVIDIA-L4"}}
    assert not [*size_findings(spec(**base, trainer=pods | {"elastic": {"min": 32}}), ())]
    (found,) = size_findings(spec(**base, trainer=pods | {"elastic": {"min": 2}}), ())
    assert (found.key, found.notice) == (("trainer", "elastic"), True)
    assert found.message.startswith("does not fit with min (2) pods: each GPU needs about")
