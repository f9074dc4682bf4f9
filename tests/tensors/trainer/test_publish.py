"""Published versions: complete, loadable and limited in number."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from rlrun.config.models.language_models import DType, ModelConfig
from rlrun.protocol.files.attempts import first_attempt, next_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.protocol.messages.buckets import Bucket, plan_buckets
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.model_files import ModelFiles, model_files
from rlrun.trainer.modeling.shard import load_model, shard_model
from rlrun.trainer.proof.small_models import small_model
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets
from rlrun.trainer.weights.version_retention import versions_to_delete
from tests.support.sets import few_in_gate

IDS = torch.arange(12)[None]
RENAMED = ("mixtral", "minimax_m2", "phimoe", "qwen3_moe", "gpt_neox", "granitemoe")
"""Families whose files name tensors differently from their modules."""


def as_files(buckets: list[Bucket], kept: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors like a safetensors reader finds them in the received buckets."""
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        found |= load(bucket.header() + bytes(kept[bucket.index].numpy()))
    return found


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all sent tensors of a model in float32."""
    buckets = plan_buckets(bucket_layout(model, "float32"))
    return as_files(buckets, gather_buckets(model, buckets, dtype="float32", root=0, pinned=False))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # float32 is the parameters' dtype, so no conversion happens
def test_sent_tensors_equal_written_tensors(
    dtype: DType, tmp_path: Path, solo: Group, source: Path, make_model: Callable[..., nn.Module]
) -> None:
    make_model("qwen3_moe").save_pretrained(source)
    config = ModelConfig(path=str(source), dtype=dtype)
    model = load_model(config, str(source))
    files = model_files(model, config, str(source))
    shard_model(model, solo)
    hf_writer.publish_version(model, tmp_path / "v1", files=files, dtype=config.dtype, group=solo)
    written = load_file(tmp_path / "v1" / hf_writer.shard_names(1)[0])
    assert any(".experts." in name for name in written)
    tensors = bucket_layout(model, config.dtype)
    buckets = plan_buckets(tensors, bucket_bytes=20_000, roots=2)
    assert len(buckets) > 2
    assert max(bucket.size for bucket in buckets) <= 20_000
    halves = [gather_buckets(model, buckets, dtype=config.dtype, root=root, pinned=False) for root in (0, 1)]
    assert {*halves[0]} == {bucket.index for bucket in buckets if bucket.root == 0}
    assert {*halves[1]} == {bucket.index for bucket in buckets if bucket.root == 1}
    with torch.no_grad():
        next(model.parameters()).add_(1)  # training continues during the transfer
    sent = as_files(buckets, halves[0] | halves[1])
    assert sent.keys() == written.keys()
    assert all(sent[n].dtype == written[n].dtype and torch.equal(sent[n], written[n]) for n in written)
    assert gather_buckets(model, buckets, dtype=config.dtype, root=None, pinned=False) == {}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_published_version_has_identical_logits_in_transformers(
    family: str, tied: bool, tmp_path: Path, solo: Group, source: Path, make_model: Callable[..., nn.Module]
) -> None:
    make_model(family, tied=tied).save_pretrained(source)
    config = ModelConfig(path=str(source), dtype="bfloat16")
    model = load_model(config, str(source))
    files = model_files(model, config, str(source))
    shard_model(model, solo)
    path = RunPaths(tmp_path).version(3, 1)
    hf_writer.publish_version(model, path, files=files, dtype=config.dtype, group=solo, shard_bytes=10_000)
    assert [version.step for version in RunPaths(tmp_path).versions_on_disk()] == [3]
    assert len(list(path.glob("model-*.safetensors"))) > 1
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)
    published = AutoModelForCausalLM.from_pretrained(path)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    assert published.dtype == torch.bfloat16
    assert type(published) is type(expected)
    assert torch.equal(published(IDS).logits, expected(IDS).logits)
    assert (
        AutoTokenizer.from_pretrained(path)("a<b").input_ids == AutoTokenizer.from_pretrained(source)("a<b").input_ids
    )


@pytest.mark.parametrize("kind", few_in_gate(RENAMED, ("mixtral", "gpt_neox")))
def test_published_files_have_the_source_names(kind: str, tmp_path: Path, solo: Group, source: Path) -> None:
    """Check written and sent names, for models loaded by slices and as a whole."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    small_model(type(whole), whole.config, attention="eager", seq_len=64, seed=0).save_pretrained(source)
    expected = load_file(source / "model.safetensors")
    config = ModelConfig(path=str(source), dtype="float32")
    for number, model in enumerate(
        (
            load_checked(config, str(source), solo, seq_len=64),
            shard_model(load_model(config, str(source)), solo),
        )
    ):
        files = model_files(model, config, str(source))
        path = tmp_path / f"v{number}"
        hf_writer.publish_version(model, path, files=files, dtype="float32", group=solo, shard_bytes=300_000)
        written: dict[str, torch.Tensor] = {}
        for file in path.glob("*.safetensors"):
            written |= load_file(file)
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        sent = everything(model)
        assert sorted(written) == sorted(sent) == sorted(index) == sorted(expected)
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
        read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        torch.testing.assert_close(read(IDS).logits, original(IDS).logits)


def test_publishing_to_full_volume_fails_without_leftovers(
    tmp_path: Path, solo: Group, make_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_writer, "save_file", full)
    path = RunPaths(tmp_path).version(1, 1)
    with pytest.raises(RoleError, match="volume is full") as caught:
        hf_writer.publish_version(
            shard_model(make_model(), solo), path, files=ModelFiles({}), dtype="float32", group=solo
        )
    assert caught.value.code == exit_codes.STORAGE
    assert str(path.parent) in str(caught.value)
    assert list(path.parent.iterdir()) == []


def test_published_shards_are_even_and_ordered() -> None:
    sizes = {f"w{index}": 10 for index in range(10)}
    runs = hf_writer.divide_names(sizes, 3)
    assert [name for run in runs for name in run] == list(sizes)
    assert sorted(len(run) for run in runs) == [3, 3, 4]
    assert hf_writer.divide_names({"big": 100, "small": 1}, 4) == [["big"], ["small"]]


def artifact(step: int, attempt: int) -> Artifact:
    return Artifact(step, attempt, Path(f"v{step}.a{attempt}"))


def test_newest_and_checkpointed_versions_are_kept() -> None:
    attempt = first_attempt(world_size=1, config_hash="")
    versions = [artifact(step, 1) for step in range(11)]
    gone = versions_to_delete(
        versions, attempt=attempt, checkpoints=[artifact(2, 1), artifact(9, 1)], max_async_level=2
    )
    assert [version.step for version in gone] == [0, 1, 3, 4, 5, 6]
    assert [v.step for v in versions_to_delete(versions, attempt=attempt, checkpoints=[], max_async_level=0)][-1] == 7


def test_versions_outside_the_lineage_are_deleted() -> None:
    second = next_attempt(first_attempt(world_size=1, config_hash=""), 4, attempt=2, world_size=1, config_hash="")
    versions = [artifact(3, 1), artifact(4, 1), artifact(4, 2), artifact(5, 1), artifact(5, 2), artifact(6, 3)]
    gone = versions_to_delete(versions, attempt=second, checkpoints=[], max_async_level=2)
    assert gone == [artifact(4, 1), artifact(5, 1)]


def test_base_version_of_kept_deltas_is_kept() -> None:
    second = next_attempt(first_attempt(world_size=1, config_hash=""), 2, attempt=2, world_size=1, config_hash="")
    versions = [artifact(0, 1), artifact(2, 2), artifact(4, 2), artifact(9, 2)]
    deltas = [artifact(1, 1), artifact(2, 1), *(artifact(step, 2) for step in range(3, 11)), artifact(3, 3)]
    gone = versions_to_delete(versions, attempt=second, checkpoints=[], max_async_level=1, deltas=deltas)
    assert gone == [artifact(0, 1), artifact(2, 2), artifact(1, 1), artifact(2, 1), artifact(3, 2), artifact(4, 2)]


def test_files_with_module_names_keep_them(tmp_path: Path, solo: Group, source: Path) -> None:
    """Only converted names are reverted, and these files needed no conversion."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_neox"]())
    small = small_model(type(whole), whole.config, attention="eager", seq_len=64, seed=0)
    small.save_pretrained(source, save_original_format=False)
    expected = load_file(source / "model.safetensors")
    assert "lm_head.weight" in expected
    model = load_checked(ModelConfig(path=str(source), dtype="float32"), str(source), solo, seq_len=64)
    assert sorted(everything(model)) == sorted(expected)
