"""Golden files with every child of the example runs. `RLRUN_WRITE_GOLDEN=1 pytest tests/unit/operator/build/test_golden.py` writes
them."""

from __future__ import annotations

import difflib
import json
import os
from typing import Any

import pytest
import yaml

from tests.unit.operator.build.examples import HERE, ON_RECORD, everything, example


def render_text(name: str) -> str:
    documents = everything(example(name))
    for document in documents:
        if document["kind"] == "ConfigMap":  # parsed text gives a difference of one line
            document["data"] = {key: json.loads(text) for key, text in document["data"].items()}
    return yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=120)


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@pytest.mark.parametrize("name", ON_RECORD)
def test_rendered_children_match_golden_file(name: str) -> None:
    file = HERE / "golden" / f"{name}.yaml"
    if os.environ.get("RLRUN_WRITE_GOLDEN"):
        file.write_text(render_text(name))
    lines = difflib.unified_diff(
        file.read_text().splitlines(), render_text(name).splitlines(), "on record", "rendered", n=6
    )
    difference = "\n".join(lines)
    assert not difference, f"{file.name}; if this is meant, write it anew with RLRUN_WRITE_GOLDEN=1:\n{difference}"
