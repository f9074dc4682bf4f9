"""Numbers and names in the pages of models."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.family_table import LABELS
from tools.docs_models import TEMPLATES, is_trained, models_page, read_results

PAGE = Path(__file__).parents[3] / "docs/models.md"
TYPES = read_results("architectures")["types"]


def test_models_page_has_the_measured_numbers_of_types() -> None:
    text = " ".join(PAGE.read_text().split())
    trained = sum(is_trained(found) for found in TYPES.values())
    assert f"Of the {len(TYPES)} model types in transformers" in text
    assert f"{trained} are trained with their default configuration" in text


def test_models_reference_has_one_row_for_each_type() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \|", models_page(), re.MULTILINE)
    assert sorted(rows) == sorted(TYPES)


def test_conversations_of_types_are_played_templates() -> None:
    names = {name for templates in TEMPLATES.values() for name in templates}
    assert names <= {*LABELS.values()}
    assert TEMPLATES.keys() <= {kind for kind, found in TYPES.items() if is_trained(found)}
