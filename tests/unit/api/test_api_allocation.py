"""`spec.allocation`, the short form of trainer and engine fields, and its conflicts with these fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.run_manifest import parse_manifest
from rlrun.cli.run_layers import RlConfig
from rlrun.config.loading.problems import ConfigError
from rlrun.fit.advice import change_spec
from rlrun.local.model_sizes import allocation_notice

MANIFEST = """apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: words}
spec:
  allocation: sglang:d4t2+megatron:d8p1t2
  model: {path: m}
  environments: [{id: reverse-text}]
"""


def spec(text: str, **changes: Any) -> RLRunSpec:
    base: dict[str, Any] = {"model": {"path": "m"}, "environments": [{"id": "x"}], "allocation": text}
    return RLRunSpec(**base | changes)


def layout(run: RLRunSpec) -> tuple[int, ...]:
    trainer, engine = run.trainer, run.inference
    return (
        *(trainer.replicas, trainer.gpus_per_replica, trainer.parallelism.tp),
        *(engine.replicas, engine.gpus_per_replica, engine.tensor_parallel, engine.data_parallel),
    )


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("vllm:d4t2+fsdp:d8", {}, (1, 8, 1, 4, 2, 2, 1)),
        ("vllm:d4t2+fsdp:d16", {}, (2, 8, 1, 4, 2, 2, 1)),
        ("vllm:d4t2+fsdp:d16", {"trainer": {"gpus_per_replica": 4}}, (4, 4, 1, 4, 2, 2, 1)),
        ("vllm:d4t2+fsdp:d16", {"trainer": {"replicas": 8}}, (8, 2, 1, 4, 2, 2, 1)),
        ("sglang:d4p2t2+d4t2", {}, (1, 8, 2, 4, 4, 4, 1)),
        ("vllm:d8t1+fsdp:d2", {"inference": {"dataParallel": 4}}, (1, 2, 1, 2, 4, 1, 4)),
        ("vllm:d4t2+megatron:(attn:d4t2|ffn:d2t2e2)", {"inference": {"replicas": 4}}, (1, 8, 2, 4, 2, 2, 1)),
        ("vllm:d8t2|fsdp:d16", {"algorithm": {"maxAsyncLevel": 0}}, (2, 8, 1, 1, 8, 2, 4)),
        ("fsdp:d2", {}, (1, 2, 1, 1, 0, 1, 1)),
    ],
)
def test_allocation_sets_trainer_and_engine_fields(
    text: str, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    run = spec(text, **changes)
    assert layout(run) == expected
    assert run.placement.colocate == ("|fsdp" in text)
    assert layout(RlConfig(**dict(run)).spec()) == expected, "a resolved specification is read again"


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("vllm:d4+fsdp:d8", {"trainer": {"parallelism": {"tp": 2}}}, "tp (2) differs from 1, its value in allocation (vllm:d4+fsdp:d8);"),
        ("vllm:d4+fsdp:d8", {"inference": {"gpusPerReplica": 0}}, "inference.gpusPerReplica (0) differs from 1, its value in allocation"),
        ("vllm:d4+fsdp:d8", {"inference": {"dataParallel": 3}}, "inference.dataParallel (3) differs from 1, its value in allocation"),
        ("vllm:d4+fsdp:d8", {"trainer": {"gpus_per_replica": 3}}, "trainer.gpusPerReplica (3) does not divide the 8 GPUs"),
        ("vllm:d4+fsdp:d11", {}, "a trainer of 11 GPUs, which do not fill 2 pods of up to 8; change it or set trainer.gpusPerReplica"),
        ("vllm:d4|fsdp:d8", {}, "with '|' they must be the same GPUs: change the degrees"),
        ("vllm:d4+fsdp:d8", {"trainer": {"shared_with": "host", "lora": {}}}, "is set by the host (host) of trainer.sharedWith; remove"),
        ("vllm:d4+fsdp:d8", {"task": "Eval"}, "has a trainer, but task Eval has no trainer; write only vllm:d4"),
        ("vllm:d4+fsdp:d8", {"task": "SFT"}, "has engines, but task SFT has no engines; write only the trainer, such as fsdp:d8"),
        ("vlm:d4+fsdp:d8", {}, "allocation: 'vlm' in 'vlm:d4+fsdp:d8' is not a known backend; known: sglang, vllm, fsdp, megatron, archon"),
    ],
)  # fmt: skip
def test_allocation_conflict_is_refused_with_both_values_and_fix(
    text: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        spec(text, **changes)
    (error,) = refused.value.errors()
    assert message in error["msg"]


def test_allocation_conflicts_are_reported_together_per_manifest_line() -> None:
    fields = "  trainer:\n    replicas: 3\n  inference:\n    replicas: 2\n"
    with pytest.raises(ConfigError) as refused:
        parse_manifest(MANIFEST + fields, "run.yaml")
    assert [str(problem).partition(";")[0] for problem in refused.value.problems] == [
        "run.yaml:9: spec: trainer.replicas (3) differs from 2, its value in allocation (sglang:d4t2+megatron:d8p1t2)",
        "run.yaml:11: spec: inference.replicas (2) differs from 4, its value in allocation (sglang:d4t2+megatron:d8p1t2)",
    ]
    (notice,) = allocation_notice(parse_manifest(MANIFEST, "run.yaml")[0].spec)
    assert notice.notice
    assert notice.message == (
        "is trainer: 2 x 8 GPUs, tp 2, inference: 4 x 2 GPUs (tensorParallel 2, dataParallel 1); sglang is replaced by vllm; "
        "megatron is replaced by fsdp"
    )
    document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "words"}}
    run = {"allocation": "vllm:d4t2+fsdp:d16", "model": {"path": "m"}, "environments": [{"id": "x"}],
           "trainer": {"gpusPerReplica": 4}}  # fmt: skip
    read = RLRun.model_validate({**document, "spec": run}, strict=True).spec
    assert layout(read) == (4, 4, 1, 4, 2, 2, 1), "as the operator reads it"


def test_allocation_pipeline_sets_trainer_pp_and_engine_tp() -> None:
    run = spec("vllm:d2p2+megatron:d2p4t2")
    assert (run.trainer.parallelism.pp, run.trainer.parallelism.tp) == (4, 2)
    assert run.trainer.replicas * run.trainer.gpus_per_replica == 16
    (notice,) = allocation_notice(run)
    assert "tp 2, pp 4" in notice.message
    assert (
        "p2 of the engines is added to tensorParallel, because engines have no pipeline parallelism" in notice.message
    )
    assert "of the trainer" not in notice.message


def test_advice_about_memory_changes_the_fields() -> None:
    run = change_spec(spec("vllm:d4+fsdp:d8"), {"spec.trainer.gpusPerReplica": 4})
    assert (run.allocation, run.trainer.gpus_per_replica, run.inference.replicas) == (None, 4, 4)
