"""Chat templates of real models, from packages that ship them, with a byte-level tokenizer that has their special
tokens.

The templates are read from the installed packages, and are not copied. The values of a family's
`generation_config.json` are in the table, because no package has those files.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.cluster.cache import cache_root, locked

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/templates.txt"
TRL, AXOLOTL = "trl/chat_templates", "axolotl/utils/chat_templates/templates"
MISTRAL = "mistral_common"
"""Package that writes the templates of Mistral's tokenizers in code."""
_SPECIAL = (
    r'<\|[A-Za-z0-9_"/]+\|>|<\|[a-z_"]+>|<[a-z_]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|\[\|[a-z]+\|\]'
    r"|<(?:start|end)_of_[a-z]+>|<[A-Z_]+_TOKEN>"
)
"""Texts in templates that are special tokens of the families' tokenizers."""
_ORDINARY = [
    f"<{slash}{name}>"
    for name in ("think", "tool_call", "tool_response", "tools", "arg_key", "arg_value", "function", "parameter")
    for slash in ("", "/")
]
"""Tokens that are added to vocabularies without being special."""


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        file: its template, in one of the packages.
        eos: the tokenizer's end-of-sequence token.
        ends: `eos_token_id` of its generation_config.json, as texts.
        bos: first token of a prompt, or None.
        end: token with which its replies end before a question.
        call_end: token with which its replies end after calls. Default: `end`.
        form: way in which it writes tools: "native", or the describing part (a role, or the template) and the role of
            results.
        keeps: whether its template writes earlier replies as they were sampled; others drop or add thoughts.
        thought: text that its models sample for a thought before a reply, after the generation prompt; None: they do
            not think.
        head: text that they sample before the content of a reply.
        thinks_with: arguments with which its template enables thoughts.
    """

    file: str
    eos: str
    ends: tuple[str, ...]
    bos: str | None
    end: str
    call_end: str | None = None
    form: str = "native"
    keeps: bool = True
    thought: str | None = None
    head: str = ""
    thinks_with: tuple[tuple[str, Any], ...] = ()


_QWEN = ("<|im_end|>", "<|endoftext|>")
_LLAMA = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_GEMMA4 = ("<eos>", "<turn|>", "<|tool_response>")
_DEEPSEEK = "<｜end▁of▁sentence｜>"
_COHERE = "<|END_OF_TURN_TOKEN|>"


def _family(package: str, name: str, *rest: Any, **more: Any) -> Family:
    return Family(f"{package}/{name}.jinja", *rest, **more)


FAMILIES: dict[str, Family] = {
    "llama3": _family(TRL, "llama3", "<|eot_id|>", (_LLAMA[0], _LLAMA[2]), "<|begin_of_text|>", "<|eot_id|>", form="system tool"),
    "llama3_1": _family(TRL, "llama3_1", "<|eot_id|>", _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_2": _family(TRL, "llama3_2", "<|eot_id|>", _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama4": _family(AXOLOTL, "llama4", "<|eot|>", ("<|end_of_text|>", "<|eom|>", "<|eot|>"), "<|begin_of_text|>", "<|eot|>"),
    "qwen2_5": _family(TRL, "qwen2_5", "<|im_end|>", _QWEN, None, "<|im_end|>"),
    "qwen3": _family(TRL, "qwen3", "<|im_end|>", _QWEN, None, "<|im_end|>"),
    "qwen3_2507": _family(TRL, "qwen3_instruct_2507", "<|im_end|>", _QWEN, None, "<|im_end|>"),
    "qwen3_5": _family(TRL, "qwen3_5_think", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "qwen3_5_nothink": _family(TRL, "qwen3_5_nothink", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "qwen3_6": _family(TRL, "qwen3_6", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "qwen3_8": _family(TRL, "qwen3_8", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "gemma2": _family(TRL, "gemma", "<eos>", ("<eos>", "<end_of_turn>"), "<bos>", "<end_of_turn>", form="user user"),
    "gemma3": _family(TRL, "gemma3", "<eos>", ("<eos>", "<end_of_turn>"), "<bos>", "<end_of_turn>", form="system user"),
    "gemma4": _family(TRL, "gemma4", "<eos>", _GEMMA4, "<bos>", "<turn|>", "<|tool_response>"),
    "gemma4_v2": _family(TRL, "gemma4_v2", "<eos>", _GEMMA4, "<bos>", "<turn|>"),
    "gemma4_v5": _family(TRL, "gemma4_v5", "<eos>", _GEMMA4, "<bos>", "<turn|>", "<|tool_response>"),
    "glm4_5": _family(
        TRL, "glm4moe", "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"), None, "<|user|>", "<|observation|>", keeps=False
    ),
    "gpt_oss": _family(
        TRL, "gptoss", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"), "<|startoftext|>", "<|return|>", "<|call|>", keeps=False
    ),
    "deepseek_v3": _family(
        TRL, "deepseekv3", _DEEPSEEK, (_DEEPSEEK,), "<｜begin▁of▁sentence｜>", _DEEPSEEK, form="system tool", keeps=False
    ),
    "deepseek_r1": _family(
        TRL, "deepseek_r1_distill", _DEEPSEEK, (_DEEPSEEK,), "<｜begin▁of▁sentence｜>", _DEEPSEEK, form="system tool", keeps=False
    ),
    "phi3": _family(TRL, "phi3", "<|endoftext|>", ("<|endoftext|>", "<|end|>"), None, "<|end|>", form="system user"),
    "phi3_5": _family(TRL, "phi3_5", "<|endoftext|>", ("<|endoftext|>", "<|end|>"), None, "<|end|>", form="system user"),
    "phi4": _family(AXOLOTL, "phi_4", "<|im_end|>", _QWEN, None, "<|im_end|>", form="system user"),
    "mistral_v1": _family(AXOLOTL, "mistral_v1", "</s>", ("</s>",), "<s>", "</s>", form="system user", keeps=False),
    "mistral_v3": _family(AXOLOTL, "mistral_v2v3", "</s>", ("</s>",), "<s>", "</s>", keeps=False),
    "mistral_v3_tekken": _family(AXOLOTL, "mistral_v3_tekken", "</s>", ("</s>",), "<s>", "</s>"),
    "mistral_v7_tekken": _family(AXOLOTL, "mistral_v7_tekken", "</s>", ("</s>",), "<s>", "</s>", form="system user"),
    "cohere": _family(TRL, "cohere", _COHERE, (_COHERE,), "<BOS_TOKEN>", _COHERE, form="system user"),
    "cohere2": _family(TRL, "cohere2", _COHERE, (_COHERE,), "<BOS_TOKEN>", "<|END_RESPONSE|>", form="system user"),
    "command_a": _family(AXOLOTL, "command_a", _COHERE, (_COHERE,), "<BOS_TOKEN>", "<|END_RESPONSE|>", form="system user"),
    "lfm2": _family(TRL, "lfm2", "<|im_end|>", ("<|im_end|>",), "<|startoftext|>", "<|im_end|>", form="template tool"),
    "lfm2_5": _family(TRL, "lfm2_2_5", "<|im_end|>", ("<|im_end|>",), "<|startoftext|>", "<|im_end|>"),
    "nemotron3_nano": _family(TRL, "nemotron_3_nano", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "nemotron3_super": _family(TRL, "nemotron_3_super", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "nemotron3_ultra": _family(TRL, "nemotron_3_ultra", "<|im_end|>", _QWEN, None, "<|im_end|>", keeps=False),
    "exaone4": _family(AXOLOTL, "exaone4", "[|endofturn|]", ("[|endofturn|]",), "[BOS]", "[|endofturn|]"),
    "falcon_h1": _family(AXOLOTL, "falcon_h1", "<|im_end|>", ("<|im_end|>", "<|end_of_text|>"), None, "<|im_end|>", form="template tool"),
    "jamba": _family(AXOLOTL, "jamba", "<|eom|>", ("<|eom|>",), "<|startoftext|>", "<|eom|>", keeps=False),
}  # fmt: skip
FAMILIES |= {
    f"mistral_common_{name}": Family(
        f"{MISTRAL}/{name}", "</s>", ("</s>",), "<s>", "</s>", keeps=name not in ("v3", "v7")
    )
    for name in ("v3", "v3_tekken", "v7", "v7_tekken", "v11", "v13")
}
_THOUGHTS: dict[str, str] = {
    "qwen3": "<think>\n{}\n</think>\n\n",
    **dict.fromkeys(("qwen3_5", "qwen3_6", "qwen3_8", "deepseek_v3", "deepseek_r1", "exaone4"), "{}\n</think>\n\n"),
    **dict.fromkeys(("nemotron3_nano", "nemotron3_super"), "{}\n</think>\n"),
    "nemotron3_ultra": "{}</think>",
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v5"), "<|channel>thought\n{}\n<channel|>"),
    "glm4_5": "\n<think>{}</think>\n",
    "gpt_oss": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "lfm2_5": "<think>{}</think>",
    "phi4": "<think>{}</think>",
}
"""Thoughts as the families' models sample them; some prompts open the thought already."""
FAMILIES |= {name: replace(FAMILIES[name], thought=thought) for name, thought in _THOUGHTS.items()}
FAMILIES["gpt_oss"] = replace(FAMILIES["gpt_oss"], head="<|channel|>final<|message|>")
_EXAONE = (("enable_thinking", True), ("skip_think", False))
FAMILIES["exaone4"] = replace(FAMILIES["exaone4"], thinks_with=_EXAONE)
IN_GATE = (
    "llama3", "llama3_1", "qwen3", "qwen3_5", "gemma2", "gemma4", "glm4_5", "gpt_oss", "deepseek_v3", "phi3", "mistral_v3", "cohere2",
    "lfm2", "exaone4", "mistral_common_v3",
)  # fmt: skip
"""Families in the gate's tests of templates: one for each way to write tools, ends, earlier replies and thoughts.
`family_table` plays all families."""


@cache
def packages() -> Path:
    """Return the folder with the packages, installed once for each lock file, without their dependencies."""
    folder = cache_root() / f"templates-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    with locked("templates"):
        if not (done := folder / ".done").exists():
            uv = Path(sys.executable).with_name("uv")
            command = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", sys.executable]
            subprocess.run([*command, "--target", folder, "-r", LOCK], check=True)
            done.touch()
    return folder


def read_template(family: Family) -> str:
    """Return a family's chat template."""
    package, _, name = family.file.partition("/")
    if package != MISTRAL:
        return (packages() / family.file).read_text()
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    version, _, kind = name.partition("_")
    off = dict.fromkeys(("image_support", "audio_support", "thinking_support", "plain_thinking_support"), False)
    unset = dict.fromkeys(
        ("default_system_prompt", "model_settings_fields", "reasoning_effort_values", "reasoning_effort_default")
    )
    return generate_chat_template(
        spm=not kind and version in ("v3", "v7"),
        tokenizer_version=TokenizerVersion(version),
        use_special_token_variables=False,
        **off,
        **unset,
    )


@cache
def real_tokenizer(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a tokenizer with a family's template and special tokens, and the ids of its generation config's ends."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    text = read_template(family)
    special = {*re.findall(_SPECIAL, text), family.eos, *family.ends, family.end, *filter(None, [family.bos])}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(special)])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ORDINARY])
    # Only these special tokens have names, as in the families' own files.
    named = {"eos_token": family.eos, "pad_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = text
    return fast, tuple(fast.convert_tokens_to_ids(list(family.ends)))
