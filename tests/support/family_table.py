"""The table of chat templates in `docs/models.md`: `python -m tests.support.family_table` writes it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.support.chat_templates import FAMILIES
from tests.support.family_conversations import KINDS, STRATEGIES, Cell, Kind, play

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
HEAD = (
    "| template | replies end with | calls and results "
    "| chat | chat, branching | thoughts | thoughts, branching | tools | tools, branching |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
LABELS = {
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1",
    "llama3_2": "Llama 3.2",
    "llama4": "Llama 4",
    "qwen2_5": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "qwen3_2507": "Qwen 3-2507",
    "qwen3_5": "Qwen 3.5, thinking",
    "qwen3_5_nothink": "Qwen 3.5, not thinking",
    "qwen3_6": "Qwen 3.6",
    "qwen3_8": "Qwen 3.8",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4, first template",
    "gemma4_v2": "Gemma 4, second template",
    "gemma4_v5": "Gemma 4, fifth template",
    "glm4_5": "GLM 4.5",
    "gpt_oss": "GPT-OSS (Harmony)",
    "deepseek_v3": "DeepSeek V3, thinking",
    "deepseek_r1": "DeepSeek R1, distilled",
    "phi3": "Phi 3",
    "phi3_5": "Phi 3.5",
    "phi4": "Phi 4 reasoning",
    "mistral_v1": "Mistral v1",
    "mistral_v3": "Mistral v3, of Axolotl",
    "mistral_v3_tekken": "Mistral v3 Tekken, of Axolotl",
    "mistral_v7_tekken": "Mistral v7 Tekken, of Axolotl",
    "cohere": "Cohere 1",
    "cohere2": "Cohere 2",
    "command_a": "Command A",
    "lfm2": "LFM 2",
    "lfm2_5": "LFM 2.5",
    "nemotron3_nano": "Nemotron 3 Nano",
    "nemotron3_super": "Nemotron 3 Super",
    "nemotron3_ultra": "Nemotron 3 Ultra",
    "exaone4": "EXAONE 4",
    "falcon_h1": "Falcon H1",
    "jamba": "Jamba",
    "mistral_common_v3": "Mistral v3",
    "mistral_common_v3_tekken": "Mistral v3 Tekken",
    "mistral_common_v7": "Mistral v7",
    "mistral_common_v7_tekken": "Mistral v7 Tekken",
    "mistral_common_v11": "Mistral v11",
    "mistral_common_v13": "Mistral v13",
}
_FORMS = {
    "native": "by the template",
    "template tool": "by the template, calls as text",
    "system tool": "as text",
    "system user": "as text, results of role `user`",
    "user user": "as text, described in the first user message, results of role `user`",
}


def is_sound(kind: Kind, strategy: str, cell: Cell) -> bool:
    """Return whether a cell may be claimed: it plays, the ids are equal, and the prompts are the template's."""
    return not cell.error and cell.ids and cell.appended and (cell.whole or strategy == "interleaved")


async def row(name: str) -> str:
    """Return a family's row.

    Raises:
        ValueError: a cell fails.
    """
    family = FAMILIES[name]
    ends = f"`{family.end}`" + (f", `{family.call_end}` after calls" if family.call_end else "")
    cells = [LABELS[name], ends.replace("|", "\\|"), _FORMS[family.form]]
    for kind in KINDS:
        for strategy in STRATEGIES:
            if kind == "thoughts" and family.thought is None:
                cells.append("-")
                continue
            cell = await play(name, kind, strategy)
            if not is_sound(kind, strategy, cell):
                raise ValueError(f"{name}, {kind}, {strategy}: {cell}")
            text = "whole" if cell.whole else "added"
            cells.append(text if strategy == "interleaved" else f"{text}, {cell.samples}")
    return f"| {' | '.join(cells)} |"


def rows_of_page() -> list[str]:
    """Return the rows that the page has."""
    _, _, rest = PAGE.read_text().partition(HEAD + "\n")
    return rest.partition("\n\n")[0].splitlines()


def main() -> int:
    """Write the table; returns the exit code."""
    text = PAGE.read_text()
    before, found, rest = text.partition(HEAD + "\n")
    if not found:
        print(f"{PAGE} has no line {HEAD.splitlines()[0]}", file=sys.stderr)
        return 1
    rows = [asyncio.run(row(name)) for name in FAMILIES]
    PAGE.write_text(f"{before}{HEAD}\n" + "\n".join(rows) + "\n\n" + rest.partition("\n\n")[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
