"""Folders of models that are not a causal language model to train, as their authors publish them or as a copy leaves them.

Each function receives a folder with a complete small Qwen 3 and its tokenizer, and changes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from rlrun.trainer.modeling.tiny_model import make_tokenizer

_SHARD = "model-00001-of-00002.safetensors"
_INDEX = "model.safetensors.index.json"


def make_suitable(folder: Path, **options: Any) -> None:
    """Write a small Qwen 3 with a tokenizer, which the trainer supports."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    _write(folder, Qwen3ForCausalLM(_config(len(tokenizer), **options)))


def _config(vocabulary: int, **options: Any) -> Qwen3Config:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return Qwen3Config(vocab_size=vocabulary, **sizes, **heads, **{"tie_word_embeddings": False, **options})


def _write(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    model.save_pretrained(folder, **options)


def _remake(kind: type[PreTrainedModel], **options: Any) -> Callable[[Path], None]:
    """Replace the model by one of class `kind` with the same configuration."""

    def make(folder: Path) -> None:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        (folder / "generation_config.json").unlink()
        _write(folder, kind(_config(vocabulary, **options)))

    return make


def _replace_by(kind: type[PreTrainedModel], config: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _write(folder, kind(config()))

    return make


def set_config(folder: Path, **changes: Any) -> None:
    """Change `config.json`; a value of None removes the field."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def _set(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: set_config(folder, **changes)


def _sentence_transformers(folder: Path) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "cosine"}')


def _tied_sentence_transformers(folder: Path) -> None:
    """Write the files of Qwen3-Embedding: a tied causal class, and the modules of sentence-transformers."""
    _remake(Qwen3ForCausalLM, tie_word_embeddings=True)(folder)
    _sentence_transformers(folder)


def _without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def _adapter(base: str | None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _without_weights(folder)
        (folder / "config.json").unlink()
        content = {"peft_type": "LORA", "base_model_name_or_path": base}
        (folder / "adapter_config.json").write_text(json.dumps(content))
        save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")

    return make


def _gguf(folder: Path) -> None:
    _without_weights(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def _pipeline(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))


def _diffusion_part(folder: Path) -> None:
    _without_weights(folder)
    (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel", "sample_size": 64}))
    save_file({"conv_in.weight": torch.zeros(2, 2)}, folder / "diffusion_pytorch_model.safetensors")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _in_shards(folder: Path) -> None:
    _without_weights(folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    _write(folder, Qwen3ForCausalLM(_config(vocabulary)), max_shard_size="40KB")


def _shard_missing(folder: Path) -> None:
    _in_shards(folder)
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def _index_missing(folder: Path) -> None:
    _in_shards(folder)
    (folder / _INDEX).unlink()


def _index_broken(folder: Path) -> None:
    _in_shards(folder)
    (folder / _INDEX).write_text("{")


def _index_names_other(folder: Path) -> None:
    """Name a file that never existed for one tensor, as a renamed file does."""
    _in_shards(folder)
    index = json.loads((folder / _INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    (folder / _INDEX).write_text(json.dumps(index))


def _index_stale(folder: Path) -> None:
    """Let the index say that a tensor is in a file that lacks it."""
    _in_shards(folder)
    index = json.loads((folder / _INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    (folder / _INDEX).write_text(json.dumps(index))


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _no_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")


def _tensor_missing(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def _draft_head(folder: Path) -> None:
    """Write an EAGLE head, which has one decoder layer and no embedding."""
    set_config(
        folder, architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, layer_types=None
    )
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "layers.0" in name}
    save_file(tensors, file, metadata={"format": "pt"})


def _consolidated(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "config.json").rename(folder / "params.json")


def _bert() -> BertConfig:
    return BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def _t5() -> T5Config:
    return T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)


def _t5_encoder() -> T5Config:
    return T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, is_encoder_decoder=False)


def _whisper() -> WhisperConfig:
    sizes: dict[str, Any] = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    return WhisperConfig(vocab_size=128, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes, **tokens)


def _wav2vec() -> Wav2Vec2Config:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    convolutions: dict[str, Any] = {
        "conv_dim": (8, 8),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2,
    }
    return Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        **sizes,
        **convolutions,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )


UNSUITABLE: Mapping[str, Callable[[Path], None]] = {
    "embedding model without a head": _remake(Qwen3Model),
    "embedding model with a tied head": _remake(Qwen3Model, tie_word_embeddings=True),
    "sentence-transformers of a causal class": _tied_sentence_transformers,
    "reranker": _remake(Qwen3ForSequenceClassification),
    "token classification": _remake(Qwen3ForTokenClassification),
    "encoder": _replace_by(BertModel, _bert),
    "encoder with a masked head": _replace_by(BertForMaskedLM, _bert),
    "encoder and decoder": _replace_by(T5ForConditionalGeneration, _t5),
    "encoder of a pair": _replace_by(T5EncoderModel, _t5_encoder),
    "speech to text": _replace_by(WhisperForConditionalGeneration, _whisper),
    "audio encoder": _replace_by(Wav2Vec2ForCTC, _wav2vec),
    "diffusion pipeline": _pipeline,
    "part of a diffusion pipeline": _diffusion_part,
    "adapter": _adapter("Qwen/Qwen3-0.6B"),
    "adapter without base": _adapter(None),
    "GGUF": _gguf,
    "empty folder": _empty,
    "weights without a shard": _shard_missing,
    "shards without index": _index_missing,
    "broken index": _index_broken,
    "index that names an absent file": _index_names_other,
    "index that names another file": _index_stale,
    "no architectures": _set(architectures=None),
    "no model_type": _set(model_type=None),
    "class of another type": _set(architectures=["LlamaForCausalLM"]),
    "unknown type": _set(model_type="qwen9", architectures=["Qwen9ForCausalLM"]),
    "own code": _set(model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}),
    "contradictory configuration": _set(num_hidden_layers=1),
    "truncated weights": _truncate,
    "pointer of Git LFS": _pointer,
    "weights without tensors": _no_tensors,
    "weights without the head": _tensor_missing,
    "draft head": _draft_head,
    "consolidated weights": _consolidated,
    "unknown quantization": _set(quantization_config={"quant_method": "quark", "bits": 4}),
}
"""Changes of a suitable folder, by the kind of model that results."""
