"""Memory of whole runs: the effect of each field, and valid recommendations."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.fit import advice
from rlrun.fit.advice import advise_roles, change_spec
from rlrun.fit.architecture import KNOWN
from rlrun.fit.memory_parts import GIB, Needs
from rlrun.fit.report import Surroundings, needs_of, refusals_of, report_document, report_lines
from rlrun.fit.trainer_memory import FRAGMENTS, RESERVE

ROOT = Path(__file__).parents[3]
SMALL, LARGE, MIXTURE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"


def spec(model: str = SMALL, **blocks: Any) -> RLRunSpec:
    """Return a run that keeps all activations, unless its trainer selects another mode."""
    base = {
        "model": {"name": model},
        "environments": [{"id": "gsm8k"}],
        "seqLen": 4096,
    }
    mode = {"activationCheckpointing": "none"}
    return RLRunSpec.model_validate(base | blocks | {"trainer": mode | blocks.get("trainer", {"gpusPerReplica": 1})})


def make_surroundings(model: str = SMALL, gib: float = 80, **more: Any) -> Surroundings:
    memory = int(gib * GIB)
    return Surroundings(KNOWN[model], memory={"trainer": memory, "inference": memory}, **more)


def trainer(model: str = SMALL, reference: str | None = None, **fields: Any) -> dict[str, float]:
    """Return the GiB of each part."""
    fields = {"gpusPerReplica": 1} | fields
    algorithm = fields.pop("algorithm", {})
    other = KNOWN[reference] if reference else None
    (found,) = needs_of(spec(model, trainer=fields, algorithm=algorithm), make_surroundings(model, reference=other))
    return {part.name: part.bytes / GIB for part in found.parts}


def engine(model: str = SMALL, gib: float = 80, **fields: Any) -> Needs:
    run = spec(model, trainer={}, inference={"gpusPerReplica": 1} | fields)
    (found,) = needs_of(run, make_surroundings(model, gib))
    return found


def test_lm_head_is_chunked_with_tensor_parallelism() -> None:
    """Each tensor rank computes its part of the positions, chunk by chunk."""
    rows = {"gpusPerReplica": 4, "microBatchTokens": 65_536}
    alone, shared = trainer(LARGE, **rows), trainer(LARGE, **rows, parallelism={"tp": 4})
    assert shared["logits"] == pytest.approx(alone["logits"])


@pytest.mark.parametrize(
    ("product", "fields", "kernel"),
    [
        ("NVIDIA-H100-80GB-HBM3", {}, "fa3, or varlen in an image without flash_attn_interface"),
        ("NVIDIA-H100-80GB-HBM3", {"computeDtype": "float32"}, "flex"),
        ("NVIDIA-B200", {}, "fa4, or varlen in an image without flash_attn.cute.interface"),
        ("NVIDIA-A100-SXM4-80GB", {}, "varlen"),
        ("Tesla-V100-SXM2-32GB", {}, "sdpa"),
        (None, {}, None),
    ],
)
def test_attention_kernel_is_reported_and_counted(
    product: str | None, fields: dict[str, Any], kernel: str | None
) -> None:
    run = spec(trainer={"gpusPerReplica": 1} | fields)
    (found,) = needs_of(run, make_surroundings(product=product))
    remarks = [remark for remark in found.remarks if remark.startswith("attention: auto")]
    assert remarks == ([] if kernel is None else [f"attention: auto is {kernel}"])
    (unknown,) = needs_of(run, make_surroundings())
    more = {part.name: part.bytes for part in found.parts}["activations"] / {
        part.name: part.bytes for part in unknown.parts
    }["activations"]
    assert (more > 1.1) == (kernel == "sdpa")


def test_soft_caps_exclude_flash_attention_3_of_the_images() -> None:
    """The table of kernels allows soft caps for `fa3`, but the build in the images has none."""
    capped = dataclasses.replace(KNOWN[SMALL], attention=frozenset({"softcap"}))
    surroundings = dataclasses.replace(make_surroundings(product="NVIDIA-H100-80GB-HBM3"), model=capped)
    (found,) = needs_of(spec(trainer={"gpusPerReplica": 1}), surroundings)
    assert "attention: auto is flex" in found.remarks


@pytest.mark.parametrize(
    ("product", "kernel", "is_reported"),
    [
        ("NVIDIA-H100-80GB-HBM3", "fa4", True),
        ("NVIDIA-H100-80GB-HBM3", "fa3", False),
        ("NVIDIA-H100-80GB-HBM3", "sdpa", False),
        ("NVIDIA-B200", "fa4", False),
    ],
)
def test_kernel_without_a_measured_rate_is_reported(product: str, kernel: str, is_reported: bool) -> None:
    run = spec(trainer={"gpusPerReplica": 1, "attention": kernel})
    (found,) = needs_of(run, make_surroundings(product=product))
    remark = f"attention: the time with {kernel} is not estimated, because it was not measured on this GPU"
    assert (remark in found.remarks) == is_reported
    assert any("one sequence takes" in one for one in found.remarks) == (kernel == "fa3")


@pytest.mark.parametrize(
    ("kernel", "features", "reason"),
    [
        ("fa3", set(), None),
        ("cudnn", set(), None),
        (
            "flash2",
            set(),
            "flash2: RLRun's GPU images do not contain flash_attn; set attention: auto, or a trainer.image",
        ),
        (
            "fa3",
            {"softcap"},
            "fa3: flash_attn_interface of RLRun's GPU images does not support soft-capped scores; set",
        ),
        ("fa4", {"softcap"}, "auto is flex"),
    ],
)
def test_requested_kernel_is_reported_only_if_images_lack_it(
    kernel: str, features: set[Any], reason: str | None
) -> None:
    model = dataclasses.replace(KNOWN[SMALL], attention=frozenset(features))
    surroundings = dataclasses.replace(make_surroundings(product="NVIDIA-H100-80GB-HBM3"), model=model)
    (found,) = needs_of(spec(trainer={"gpusPerReplica": 1, "attention": kernel}), surroundings)
    remarks = [remark for remark in found.remarks if remark.startswith("attention: ") and "a row of" not in remark]
    assert [remark.startswith(f"attention: {reason}") for remark in remarks] == ([] if reason is None else [True])


def test_attention_time_follows_measured_rates() -> None:
    """The table of kernels contains one layer of Qwen3-0.6B, which has 28; the rates apply to 16,384 tokens."""

    def told(tokens: int, **fields: Any) -> str:
        longest = fields.pop("longest", tokens)
        run = spec(trainer={"gpusPerReplica": 1, "microBatchTokens": tokens} | fields, seqLen=longest)
        (found,) = needs_of(run, make_surroundings(product="NVIDIA-H100-80GB-HBM3"))
        return next(remark for remark in found.remarks if "a row of" in remark)

    measured = json.loads((ROOT / "benchmarks/results/gpu/kernels.json").read_text())["sections"]["attention"]
    for tokens, row, tolerance in ((16_384, "16k", 0.03), (65_536, "65k", 0.12)):
        seconds = [float(text) for text in re.findall(r"about ([\d.]+) s with", told(tokens))]
        rows = [measured[f"{kernel}, {row}"] for kernel in ("fa3", "varlen")]
        expected = [28 * (one["forward ms"] + one["backward ms"]) / 1000 for one in rows]
        assert seconds == pytest.approx(expected, rel=tolerance)
    assert told(16_384) == (
        "attention: a row of 16,384 tokens in one sequence takes about 0.18 s with fa3, about 0.37 s with varlen, forward and backward"
    )
    assert "about 0.47 s with varlen" in told(16_384, activationCheckpointing="full")
    assert "about 0.18 s with varlen" in told(16_384, gpusPerReplica=2, parallelism={"cp": 2})
    assert "in sequences of 4,096 takes about 0.05 s with fa3, about 0.09 s with varlen" in told(16_384, longest=4096)


def test_attention_time_is_omitted_for_unmeasured_heads() -> None:
    """The table covers heads of size 128; kernels are slower with size 64."""
    other = dataclasses.replace(KNOWN[SMALL], head_dim=64)
    surroundings = dataclasses.replace(make_surroundings(product="NVIDIA-H100-80GB-HBM3"), model=other)
    (found,) = needs_of(spec(trainer={"gpusPerReplica": 1, "microBatchTokens": 16_384}), surroundings)
    assert not any("a row of" in remark for remark in found.remarks)


def test_advice_excludes_changes_refused_by_trainer() -> None:
    """A long row fits if ranks share it, but the trainer does not divide models of this type."""
    surroundings = Surroundings(
        dataclasses.replace(KNOWN[LARGE], whole_type="gemma3"), memory={"trainer": 60 * GIB, "inference": 60 * GIB}
    )
    run = spec(LARGE, trainer={"gpusPerReplica": 4, "microBatchTokens": 32_768})
    advised = [
        path for change in advise_roles(run, surroundings, needs_of(run, surroundings)) for path in change.fields
    ]
    assert advised
    assert not any("parallelism.cp" in path for path in advised)


def test_refused_field_is_part_of_report() -> None:
    run = spec(trainer={"gpusPerReplica": 16, "parallelism": {"tp": 16}})
    found = refusals_of(run, make_surroundings())
    assert [one.field for one in found] == ["spec.trainer.parallelism.tp"]
    needs = needs_of(run, make_surroundings())
    told = "  REFUSED: spec.trainer.parallelism.tp: 16 must divide the model's key-value heads (8); lower tp"
    assert told in report_lines("a", needs, [], KNOWN[SMALL], found)
    assert report_document("a", needs, [], KNOWN[SMALL], found)["fits"] is False


def test_optimizer_states_are_float32_and_sharded() -> None:
    alone = trainer(gpusPerReplica=1)
    assert alone["parameters"] == pytest.approx(4 * 596_049_920 / GIB)
    assert alone["optimizer state"] == pytest.approx(2 * alone["parameters"])
    four = trainer(gpusPerReplica=4)
    assert four["parameters"] == pytest.approx(alone["parameters"] / 4)
    copies = trainer(gpusPerReplica=4, parallelism={"dpReplicate": 2})
    assert copies["parameters"] == pytest.approx(alone["parameters"] / 2)
    assert trainer(gpusPerReplica=4, gradientAccumulation="local")["gradients"] == pytest.approx(alone["gradients"])


def test_activations_of_16k_row_match_design() -> None:
    """Activations of Qwen3-0.6B in a row of 16,384 tokens: 31 GiB if all are kept, 2.7 with attention only, 0.9 with inputs only."""
    rows = {"microBatchTokens": 16_384, "compile": False}
    found = [trainer(activationCheckpointing=mode, **rows)["activations"] for mode in ("none", "attention", "full")]
    assert found == pytest.approx([31, 2.8, 1.0], abs=0.3)


@pytest.mark.parametrize(
    ("tokens", "gib", "fields", "mode"),
    [
        (16_384, 80, {}, "none"),
        (65_536, 80, {}, "selective"),
        (65_536, 40, {}, "attention"),
        (65_536, 21, {}, "full"),
        (65_536, 15, {}, "full"),  # the mode with the least memory, which still does not fit
        (65_536, 80, {"activationCheckpointing": "full"}, "full"),
    ],
)
def test_auto_checkpointing_selects_cheapest_fitting_mode(
    tokens: int, gib: float, fields: dict[str, Any], mode: str
) -> None:
    given = {"gpusPerReplica": 1, "microBatchTokens": tokens, "activationCheckpointing": "auto"}
    given |= {"compile": False} | fields
    (found,) = needs_of(spec(trainer=given), make_surroundings(gib=gib))
    (expected,) = needs_of(spec(trainer=given | {"activationCheckpointing": mode}), make_surroundings(gib=gib))
    assert found.parts == expected.parts
    if not fields:
        assert found.remarks[-1].startswith(f"activationCheckpointing: auto selects {mode} (")
    if mode == "selective":
        assert re.search(r"\(none needs 1\d\d\.\d GiB, selective needs 7\d\.\d GiB, of 73\.6 GiB\)", found.remarks[-1])


def test_auto_is_the_default_mode() -> None:
    given = {"gpusPerReplica": 1, "microBatchTokens": 65_536}
    named = spec(trainer=given | {"activationCheckpointing": "auto"})
    default = RLRunSpec.model_validate({**spec().model_dump(by_alias=True, exclude_unset=True), "trainer": given})
    (found,), (expected,) = (needs_of(run, make_surroundings()) for run in (default, named))
    assert found.remarks[-1].startswith("activationCheckpointing: auto selects selective (none needs ")
    assert (found.parts, found.remarks) == (expected.parts, expected.remarks)


def test_auto_leaves_a_reserve() -> None:
    """An explicit mode may fit by a small margin; auto does not select it."""
    given = {"gpusPerReplica": 1, "microBatchTokens": 16_384}
    (asked,) = needs_of(spec(trainer=given), make_surroundings())
    tight = asked.total / GIB / (1 - FRAGMENTS - RESERVE / 2)
    auto = given | {"activationCheckpointing": "auto"}
    (same,), (chosen,) = (needs_of(spec(trainer=fields), make_surroundings(gib=tight)) for fields in (given, auto))
    assert same.fits
    assert chosen.fits
    assert chosen.total < same.total


def test_advice_excludes_modes_tried_by_auto() -> None:
    run = spec(trainer={"gpusPerReplica": 1, "microBatchTokens": 65_536, "activationCheckpointing": "auto"})
    surroundings = make_surroundings(gib=12)
    found = advise_roles(run, surroundings, needs_of(run, surroundings))
    assert found
    assert not any("activationCheckpointing" in path for change in found for path in change.fields)


def test_offload_and_parallelism_reduce_gpu_memory() -> None:
    assert trainer(cpuOffload=True)["optimizer state"] == 0
    assert trainer(gpusPerReplica=2, parallelism={"cp": 2})["activations"] == pytest.approx(
        trainer()["activations"] / 2
    )
    assert trainer(optimizer={"name": "sgd"})["optimizer state"] == pytest.approx(trainer()["parameters"])
    divided = trainer(MIXTURE, gpusPerReplica=8, parallelism={"ep": 8})
    assert divided["gathered parameters"] < trainer(MIXTURE, gpusPerReplica=8)["gathered parameters"] / 2


def test_moments_in_host_memory_leave_two_buckets() -> None:
    """The embedding and head of Qwen3-8B, 2.3 GiB per moment, are not divided."""
    run = spec(LARGE, trainer={"gpusPerReplica": 4, "optimizer": {"offload": True}})
    (found,) = needs_of(run, make_surroundings(LARGE))
    parts = {part.name: part.bytes / GIB for part in found.parts}
    assert parts["optimizer state"] == pytest.approx(2 * 2 * 4 * 2 * 151_936 * 4096 / 4 / GIB, rel=0.01)
    assert parts["parameters"] == pytest.approx(trainer(LARGE, gpusPerReplica=4)["parameters"])
    told = "optimizer.offload: 61.0 GiB of host memory for each replica; a step copies 15.3 GiB each way, about 0.7 s at 50 GB/s"
    assert told in found.remarks
    small = trainer(optimizer={"offload": True, "moments": "int8"}, lora={"rank": 8})
    assert small["optimizer state"] < 0.1, "no more than there is"


def test_moments_are_moved_before_everything_is() -> None:
    run = spec(LARGE, trainer={"gpusPerReplica": 2})
    surroundings = make_surroundings(LARGE, 60)
    found = [[*change.fields] for change in advise_roles(run, surroundings, needs_of(run, surroundings))]
    moved = [one[0] for one in found if one[0].endswith(("cpuOffload", "optimizer.offload"))]
    assert moved == ["spec.trainer.optimizer.offload", "spec.trainer.cpuOffload"]


def test_lora_reduces_gradients_and_moments_but_not_masters() -> None:
    whole, adapters = trainer(LARGE), trainer(LARGE, lora={"rank": 16})
    assert adapters["optimizer state"] < whole["optimizer state"] / 50
    assert adapters["parameters"] > whole["parameters"]
    attention = trainer(LARGE, lora={"rank": 16, "targets": ["q_proj", "v_proj"]})
    assert attention["gradients"] < adapters["gradients"] / 3
    assert trainer(LARGE, lora={"rank": 16, "modulesToSave": ["lm_head"]})["gradients"] > 2
    assert trainer(LARGE, lora={"rank": 16, "slots": 4})["optimizer state"] == pytest.approx(
        4 * adapters["optimizer state"]
    )


def test_versions_between_trainer_and_engines_are_in_host_memory() -> None:
    def told(transport: str, **more: Any) -> list[str]:
        run = spec(
            LARGE,
            trainer={"gpusPerReplica": 4} | more,
            inference={"gpusPerReplica": 1},
            weightSync={"transport": transport, "deltas": "Auto"},
        )
        return [
            remark for remark in needs_of(run, make_surroundings(LARGE))[0].remarks if remark.startswith("weightSync")
        ]

    kept = "weightSync.deltas: Auto keeps one version, 15.3 GiB, in"
    assert told("Filesystem") == [
        f"{kept} host memory of up to 8 ranks, a part each, and in shared memory of each engine permanently"
    ]
    assert told("NCCL")[1:] == [f"{kept} shared memory of each engine permanently"]
    assert told("Filesystem", lora={"rank": 8}) == []


def test_reference_and_critic_models_are_counted() -> None:
    assert "reference" not in trainer()
    own = {"preset": "distill", "reference": {"model": LARGE}}
    assert trainer(reference=LARGE, algorithm=own)["reference"] == pytest.approx(2 * 8_190_735_360 / GIB)
    assert trainer(algorithm={"preset": "ppo", "critic": {}})["critic"] == pytest.approx(
        4 * trainer()["parameters"], rel=0.01
    )


@pytest.mark.parametrize("fields", [{}, {"gpusPerReplica": 2}, {"optimizer": {"name": "muon", "lr": 0.02}}])
def test_frozen_encoder_has_no_gradients_and_no_optimizer_state(fields: dict[str, Any]) -> None:
    text, encoder, ranks = KNOWN[SMALL], 400_000_000, fields.get("gpusPerReplica", 1)
    vision = dataclasses.replace(text, counted=text.parameters + encoder, encoder=encoder)
    run = spec(trainer={"gpusPerReplica": 1} | fields)
    plain, found = (
        {part.name: part.bytes for part in needs_of(run, dataclasses.replace(make_surroundings(), model=one))[0].parts}
        for one in (text, vision)
    )
    assert found.pop("encoder") == pytest.approx(4 * encoder / ranks)
    assert found == pytest.approx(plain)


def test_first_stage_has_the_frozen_encoder() -> None:
    text, encoder = KNOWN[SMALL], 4_000_000_000
    vision = dataclasses.replace(text, counted=text.parameters + encoder, encoder=encoder)
    run = spec(trainer={"gpusPerReplica": 2, "parallelism": {"pp": 2}})
    (found,) = needs_of(run, dataclasses.replace(make_surroundings(), model=vision))
    assert next(part.bytes for part in found.parts if part.name == "encoder") == 4 * encoder
    assert any("number 1 needs the most memory" in remark for remark in found.remarks)


def test_engine_cache_uses_remaining_memory() -> None:
    found = engine()
    assert found.fits
    assert found.total == pytest.approx(0.9 * 80 * GIB)
    parts = {part.name: part.bytes for part in found.parts}
    assert parts["weights"] == pytest.approx(2 * 596_049_920)
    assert any("sequences of maxModelLen (4,096)" in remark for remark in found.remarks)
    tight = engine(LARGE, 20)
    assert not tight.fits


def test_engine_arguments_count() -> None:
    def tokens(**fields: Any) -> int:
        remark = next(r for r in engine(LARGE, **fields).remarks if r.startswith("the cache holds"))
        return int(remark.split()[3].replace(",", ""))

    assert tokens(extraArgs=["--kv-cache-dtype=fp8"]) == pytest.approx(2 * tokens(), rel=0.01)
    assert tokens(extraArgs=["--quantization", "fp8"]) > tokens()
    assert tokens(extraArgs=["--max-num-batched-tokens=2048"]) > tokens()
    assert tokens(tensorParallel=2, gpusPerReplica=2) > 2 * tokens()
    (weights,) = [part for part in engine(LARGE, extraArgs=["--quantization=fp8"]).parts if part.name == "weights"]
    assert weights.why == "fp8, embedding and head bfloat16"


@pytest.mark.parametrize(("product", "able"), [("NVIDIA-A100-SXM4-80GB", False), ("NVIDIA-L40S", True), (None, True)])
def test_cache_in_8_bits_needs_gpu_that_supports_it(product: str | None, able: bool) -> None:
    around = make_surroundings(LARGE, 22, engine_product=product)
    run = spec(LARGE, trainer={}, inference={"gpusPerReplica": 1, "extraArgs": ["--kv-cache-dtype=fp8"]}, seqLen=1024)
    (found,) = needs_of(run, around)
    assert any("only vLLM's FlashInfer backend supports it" in remark for remark in found.remarks) is not able
    long = spec(LARGE, trainer={}, inference={"gpusPerReplica": 1}, seqLen=16_000)
    changes = [str(change) for change in advise_roles(long, around, needs_of(long, around))]
    assert any("--kv-cache-dtype=fp8" in change for change in changes) is able, changes


def test_cpu_run_and_guest_need_no_gpu_memory() -> None:
    assert needs_of(spec(trainer={}), make_surroundings()) == []
    assert needs_of(spec(trainer={"sharedWith": "host", "lora": {}}), make_surroundings()) == []


RUNS: list[tuple[str, float, dict[str, Any]]] = [
    (SMALL, 24, {"trainer": {"gpusPerReplica": 1, "microBatchTokens": 32_768}}),
    (SMALL, 16, {"trainer": {"gpusPerReplica": 1, "compile": True}, "seqLen": 16_384}),
    (LARGE, 80, {"trainer": {"gpusPerReplica": 1}}),
    (LARGE, 80, {"trainer": {"gpusPerReplica": 4, "gradientAccumulation": "local"}}),
    (LARGE, 40, {"trainer": {"gpusPerReplica": 8, "parallelism": {"dpReplicate": 2}}}),
    (LARGE, 80, {"seqLen": 131_072, "trainer": {"gpusPerReplica": 8, "activationCheckpointing": "full"}}),
    (LARGE, 18, {"trainer": {}, "inference": {"gpusPerReplica": 1}}),
    (LARGE, 24, {"trainer": {}, "inference": {"gpusPerReplica": 2, "dataParallel": 2}, "seqLen": 32_768}),
    (MIXTURE, 80, {"trainer": {"gpusPerReplica": 4}, "inference": {"gpusPerReplica": 1}}),
    (
        SMALL,
        24,
        {
            "trainer": {"gpusPerReplica": 1, "microBatchTokens": 16_384},
            "inference": {"gpusPerReplica": 1, "gpuMemoryUtilization": 0.99},
            "placement": {"colocate": True},
            "algorithm": {"maxAsyncLevel": 0},
        },
    ),
]


@pytest.mark.parametrize(("model", "gib", "blocks"), RUNS, ids=range(len(RUNS)))
def test_advice_fits_without_affecting_other_role(model: str, gib: float, blocks: dict[str, Any]) -> None:
    run, surroundings = spec(model, **blocks), make_surroundings(model, gib)
    before = needs_of(run, surroundings)
    assert not all(one.fits for one in before)
    advice = advise_roles(run, surroundings, before)
    assert {change.role for change in advice} == {one.role for one in before if not one.fits}
    for change in advice:
        fields = {path: None if value == "removed" else value for path, value in change.fields.items()}
        after = needs_of(change_spec(run, fields), surroundings)
        assert next(one for one in after if one.role == change.role).fits
        fitted = {one.role for one in before if one.fits}
        assert fitted <= {one.role for one in after if one.fits}


def test_layers_are_compiled_on_gpus() -> None:
    """Compiled layers recompute values instead of keeping them; ranks that share a layer do not compile it."""
    rows = {"gpusPerReplica": 2, "microBatchTokens": 16_384}
    plain, auto = trainer(**rows, compile=False), trainer(**rows)
    assert auto["activations"] < 0.7 * plain["activations"]
    assert auto == trainer(**rows, compile=True)
    shared = {**rows, "parallelism": {"tp": 2}}
    assert trainer(**shared) == trainer(**shared, compile=False)


def test_cheapest_change_is_recommended_first() -> None:
    run = spec(trainer={"gpusPerReplica": 1, "microBatchTokens": 32_768, "compile": False})
    surroundings = make_surroundings(gib=64)
    first = advise_roles(run, surroundings, needs_of(run, surroundings))[0]
    assert first.fields == {"spec.trainer.activationCheckpointing": "selective"}


def test_impossible_run_gets_no_advice() -> None:
    run = spec(LARGE, trainer={"gpusPerReplica": 1})
    surroundings = make_surroundings(LARGE, 2)
    assert advise_roles(run, surroundings, needs_of(run, surroundings)) == []


COLOCATED: dict[str, Any] = {"placement": {"colocate": True}, "algorithm": {"maxAsyncLevel": 0}}


def test_colocated_engine_leaves_memory_for_waiting_trainer() -> None:
    def run(share: float) -> RLRunSpec:
        return spec(inference={"gpusPerReplica": 1, "gpuMemoryUtilization": share}, **COLOCATED)

    greedy, surroundings = run(0.99), make_surroundings(gib=40)
    needs = needs_of(greedy, surroundings)
    assert [(one.role, one.fits) for one in needs] == [("trainer", True), ("inference", False)]
    assert advise_roles(greedy, surroundings, needs)[0].fields == {"spec.inference.gpuMemoryUtilization": 0.95}
    assert all(one.fits for one in needs_of(run(0.95), surroundings))


def test_change_that_breaks_other_role_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    run = spec(trainer={"gpusPerReplica": 1, "microBatchTokens": 32_768}, inference={"gpusPerReplica": 1}, **COLOCATED)
    surroundings = make_surroundings(gib=40)
    needs = needs_of(run, surroundings)
    assert [one.fits for one in needs] == [False, True]
    good = {"spec.trainer.activationCheckpointing": "full"}
    greedy = {"spec.inference.gpuMemoryUtilization": 0.99}
    tries = [advice._Try("a", good | greedy), advice._Try("b", good)]
    monkeypatch.setattr(advice, "_trainer_tries", lambda *_: iter(tries))
    assert [change.fields for change in advise_roles(run, surroundings, needs)] == [good]


@pytest.mark.parametrize(
    ("tokens", "row", "residuals"),
    [(16_384, "SFT 16k, best", 0), (16_384, "RL 16k, compiled, fa3", 16_384), (65_536, "RL 65k, best", 65_536)],
)
def test_memory_matches_measured_gpu_peak(tokens: int, row: str, residuals: int) -> None:
    """Peak of torch on an H200, without the memory of CUDA itself; residuals of the LM head stay in otherwise free memory."""
    measured = json.loads((ROOT / "benchmarks/results/gpu/steps.json").read_text())["sections"]["steps"][row]
    assert measured["activations"] == "none"
    parts = trainer(microBatchTokens=tokens, compile=True, activationCheckpointing="none")
    estimated = sum(parts.values()) - parts["CUDA and its libraries"] + residuals * 2 * KNOWN[SMALL].vocabulary / GIB
    assert estimated == pytest.approx(measured["peak GiB"], rel=0.07)


def test_small_model_keeps_gathered_copy_for_backward_pass() -> None:
    whole = 2 * 596_049_920 / GIB
    assert trainer()["gathered parameters"] == pytest.approx(whole, rel=0.01)
    assert trainer(gpusPerReplica=2)["gathered parameters"] < whole / 2
    assert trainer(LARGE)["gathered parameters"] < 4, "of 8 billion parameters two layers alone"


def test_quantized_model_is_refused_by_its_name() -> None:
    run = RLRunSpec.model_validate(
        {"model": {"name": "moonshotai/Kimi-K2-Thinking"}, "environments": [{"id": "reverse-text"}]}
    )
    (found,) = refusals_of(run, make_surroundings())
    assert found.field == "spec.model.name"
    assert "the format compressed-tensors is not read" in found.message
    assert refusals_of(run.model_copy(update={"task": "Eval"}), make_surroundings()) == []


def test_replayed_experts_are_counted_for_a_row() -> None:
    fields = {"microBatchTokens": 8192, "activationCheckpointing": "full"}
    replayed = trainer(MIXTURE, **fields, router={"replay": "Step"}, updatesPerStep=2, algorithm={"preset": "gspo"})
    assert replayed["routes"] * GIB == 4 * 8192 * 48 * 8
    assert "routes" not in trainer(MIXTURE, **fields)
    rollout = {"trainer": {"gpusPerReplica": 1, "router": {"replay": "Rollout"}}, "inference": {"gpusPerReplica": 1}}
    needs, *_ = needs_of(spec(MIXTURE, **rollout), make_surroundings(MIXTURE))
    (remark,) = [one for one in needs.remarks if "replay" in one]
    assert "at most 384 bytes per token" in remark
