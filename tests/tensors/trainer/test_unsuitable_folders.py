"""Folders that are not a causal language model to train: validation and trainer refuse them before they read values of weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM
from transformers.models.auto import modeling_auto

from rlrun.api.resource import RLRunSpec
from rlrun.config.families import FAMILIES
from rlrun.config.model_heads import causal_class
from rlrun.config.models.language_models import ModelConfig
from rlrun.fit.report import untrainable_models
from rlrun.hub.fetch import model_source
from rlrun.local import judge
from rlrun.local.proved_models import CHECK
from rlrun.local.user_code import CodeCheck, Finding
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.modeling.load_weights import model_on_meta
from rlrun.trainer.modeling.shard import check_source
from rlrun.trainer.modeling.stored.weight_files import Files
from rlrun.trainer.proof.start_check import check_folder, load_checked
from rlrun.trainer.ranks.group import Group
from tests.support.unsuitable_models import UNSUITABLE, make_suitable, set_config

SEQ_LEN = 64
_MODEL = "such as Qwen/Qwen3-8B"
_AGAIN = "copy or download the"
BY_CONFIG: Mapping[str, str] = {
    "embedding model without a head": r"Qwen3Model, .* as Qwen3ForCausalLM, if its files have a head: set architectures in",
    "embedding model with a tied head": rf'Qwen3Model, .*{_MODEL}, or train it as Qwen3ForCausalLM: .* to \["Qwen3ForCausalLM"\]',
    "sentence-transformers of a causal class": rf"embedding model of sentence-transformers \(modules.json\), .*{_MODEL}",
    "reranker": rf"not a causal language model \(Qwen3ForSequenceClassification, .*{_MODEL}",
    "token classification": rf"not a causal language model \(Qwen3ForTokenClassification, .*{_MODEL}",
    "encoder": rf"model without a head, such as an embedding model \(BertModel, .*made from, or another one, {_MODEL}",
    "encoder with a masked head": rf"not a causal language model \(BertForMaskedLM, .*{_MODEL}",
    "encoder and decoder": rf"an encoder and a decoder \(t5, is_encoder_decoder in config.json\), .*{_MODEL}",
    "encoder of a pair": rf"not a causal language model \(T5EncoderModel, .*{_MODEL}",
    "speech to text": rf"an encoder and a decoder \(whisper, .*{_MODEL}",
    "audio encoder": rf"not a causal language model \(Wav2Vec2ForCTC, .*{_MODEL}",
    "diffusion pipeline": rf"a pipeline of diffusers \(model_index.json\), .*{_MODEL}",
    "adapter": r"an adapter of Qwen/Qwen3-0.6B \(adapter_config.json\) .*use Qwen/Qwen3-0.6B, or merge",
    "adapter without base": r"does not name its base model; set base_model_name_or_path in adapter_config.json",
    "unknown quantization": r"the format quark is not read \(quantization_config in .*use a repository with its weights in bfloat16",
}
"""Refusals that need only files without tensors, so that `rlrun fit` has them too and the hub's weights are not downloaded."""
BY_FILES: Mapping[str, str] = {
    "GGUF": r"only weights for llama.cpp \(model-Q4_K_M.gguf\), .*use the repository",
    "weights without a shard": rf"lacks model-00003-of-00003.safetensors of the 3 files that .*{_AGAIN} missing files",
    "shards without index": rf"has model-00001-of-00003.safetensors but no model.safetensors.index.json.*{_AGAIN} index",
    "broken index": r"model.safetensors.index.json is not an index of weights: .*; copy or download it again",
    "index that names an absent file": rf"lacks head.safetensors of the 3 files that .*{_AGAIN} missing files",
    "index that names another file": rf"00002-of-00003.safetensors lacks model.embed_tokens.weight, .*{_AGAIN} index and the weights",
    "truncated weights": rf"has \d+ bytes, but its header requires \d+; {_AGAIN} file again",
    "weights without tensors": rf"model.safetensors has no tensors; {_AGAIN} file again",
    "pointer of Git LFS": rf"model.safetensors is not a safetensors file; {_AGAIN} file again",
}
BY_CLASS: Mapping[str, str] = {
    "no architectures": r'no architectures, by which engines select the class; set architectures .* to \["Qwen3ForCausalLM"\]',
    "no model_type": r"model_type in config.json is missing; set it",
    "class of another type": r'\(LlamaForCausalLM\) is a class of type llama, but model_type is qwen3; set .*\["Qwen3ForCausalLM"\]',
    "unknown type": r"is 'qwen9', .*model.class: package.module:Class, whose config_class has model_type 'qwen9'",
    "own code": r"own code \(auto_map in config.json\), .*set model.trustRemoteCode: true",
    "contradictory configuration": r"config.json is invalid: .*`num_hidden_layers` \(1\) .*; correct it",
    "weights without the head": r"its files lack lm_head.weight, .*use the files of a complete causal language model",
    "draft head": r"its files lack model.embed_tokens.weight, .*use the files of a complete causal language model",
}
EMPTY: Mapping[str, tuple[str, str]] = {
    "part of a diffusion pipeline": (
        "has neither architectures nor model_type",
        "has no weights: .* it has only diffusion_pytorch_model.safetensors; use the folder",
    ),
    "empty folder": ("has no config.json, no weights", "has no config.json; it must be a Hugging Face model folder"),
    "consolidated weights": ("has no config.json", "has no config.json; it must be a Hugging Face model folder"),
}
"""Reasons of the validation, which reports all missing parts, and of the trainer."""
SAME = {**BY_CONFIG, **BY_FILES, **BY_CLASS}


@pytest.fixture(scope="module")
def suitable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "suitable"
    make_suitable(folder)
    return folder


@pytest.fixture
def folder(suitable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the suitable model; an attempt to read values of weights fails the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(judge, "check_user_code", check_models)
    monkeypatch.setattr(Files, "_read_slices", lambda *_: pytest.fail("values of weights were read"))
    return Path(shutil.copytree(suitable, tmp_path / "m"))


def check_models(*_: object, models: Sequence[CodeCheck], **_options: object) -> list[Finding]:
    """Make the proofs of `find_problems` in this process."""
    found = []
    for check in models:
        if check.command.id == CHECK:
            options: dict[str, Any] = dict(check.command.args)
            try:
                check_folder(**options)
            except RoleError as error:
                found.append(Finding(check.key, str(error)))
    return found


def spec_of(folder: Path, **model: str) -> RLRunSpec:
    sampling = {"maxTokens": 16}
    return RLRunSpec.model_validate(
        {
            "model": {"path": str(folder), **model},
            "maxSteps": 1,
            "seqLen": SEQ_LEN,
            "sampling": sampling,
            "environments": [{"id": "reverse-text"}],
        }
    )


def problems_of(folder: Path, *, here: bool) -> list[Finding]:
    return [finding for finding in judge.find_problems(spec_of(folder), here=here) if not finding.notice]


def start(folder: Path, group: Group) -> None:
    """Load the model like a trainer."""
    model = ModelConfig(path=str(folder))
    source = model_source(model, folder.parent / "made", with_weights=True, trained=True)
    check_source(model, source)
    load_checked(model, source, group, seq_len=SEQ_LEN)


def test_each_kind_has_an_expected_refusal() -> None:
    assert SAME.keys() | EMPTY.keys() == UNSUITABLE.keys()


def test_suitable_folder_is_accepted(folder: Path, solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not problems_of(folder, here=True) + problems_of(folder, here=False)
    with pytest.raises(pytest.fail.Exception, match="values of weights were read"):
        start(folder, solo)


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_unsuitable_folder_is_refused_by_validation_and_trainer(kind: str, folder: Path, solo: Group) -> None:
    UNSUITABLE[kind](folder)
    validated, started = EMPTY.get(kind) or (SAME[kind], SAME[kind])
    for here in (True, False):
        (finding,) = problems_of(folder, here=here)
        assert finding.key == ("model", "path")
        assert re.search(validated, finding.message), finding.message
        assert "\n" not in finding.message
    with pytest.raises(RoleError, match=started) as caught:
        start(folder, solo)
    assert re.match(rf"(model\.path: |model |cannot load the model ).*{folder.name}", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", BY_CONFIG)
def test_refusal_by_configuration_needs_no_weights(kind: str, folder: Path) -> None:
    UNSUITABLE[kind](folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    ((key, message),) = untrainable_models(spec_of(folder))
    assert key == ("model", "path")
    assert re.search(BY_CONFIG[kind], message)


def test_embedding_model_is_trained_with_the_named_causal_class(folder: Path, solo: Group) -> None:
    UNSUITABLE["embedding model with a tied head"](folder)
    (finding,) = problems_of(folder, here=True)
    named = re.search(r'set architectures in config.json to \["(\w+)"\]', finding.message)
    assert named is not None
    set_config(folder, architectures=[named[1]])
    assert not problems_of(folder, here=True)


def test_embedding_model_without_a_head_lacks_it_with_the_causal_class(folder: Path) -> None:
    UNSUITABLE["embedding model without a head"](folder)
    set_config(folder, architectures=["Qwen3ForCausalLM"])
    (finding,) = problems_of(folder, here=True)
    assert "its files lack lm_head.weight" in finding.message


def test_sentence_transformers_are_trained_without_their_modules(folder: Path) -> None:
    UNSUITABLE["sentence-transformers of a causal class"](folder)
    (folder / "modules.json").write_text('[{"type": "other.Module"}]')
    assert not problems_of(folder, here=True)


def test_named_base_class_needs_no_causal_class_with_own_class(folder: Path) -> None:
    set_config(folder, architectures=["OwnModel"], model_type="own")
    assert untrainable_models(spec_of(folder))
    assert not untrainable_models(spec_of(folder, **{"class": "own:Own"}))


def test_weights_without_tensors_are_not_loaded(folder: Path, solo: Group) -> None:
    """Parameters without values would be trained."""
    UNSUITABLE["weights without tensors"](folder)
    with pytest.raises(RoleError, match=r"cannot load the model .*: model.safetensors has no tensors"):
        load_checked(ModelConfig(path=str(folder)), str(folder), solo, seq_len=SEQ_LEN)


def test_class_without_a_head_is_refused_by_transformers(folder: Path) -> None:
    set_config(folder, architectures=["Qwen3PreTrainedModel"])
    with pytest.raises(RoleError, match=r"\(Qwen3PreTrainedModel\) is not a causal language model; if its files have"):
        model_on_meta(ModelConfig(path=str(folder)), str(folder))


@pytest.mark.parametrize("names", [["Qwen3ForCausalLM"], ["UnknownForCausalLM"], ["Qwen3Model", "Qwen3ForCausalLM"]])
def test_causal_and_unknown_classes_are_accepted(names: list[str], folder: Path) -> None:
    set_config(folder, architectures=names)
    assert isinstance(model_on_meta(ModelConfig(path=str(folder)), str(folder)), Qwen3ForCausalLM)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_causal_class_of_a_base_class_is_that_of_transformers(kind: str) -> None:
    base = modeling_auto.MODEL_MAPPING_NAMES[kind]
    assert isinstance(base, str)
    assert causal_class(base) == modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
