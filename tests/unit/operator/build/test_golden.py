"""Every child of four runs, to the letter: a change of what is rendered shows in the diff of a file.

`RLRUN_WRITE_GOLDEN=1 pytest tests/unit/operator/build/test_golden.py` writes the files anew.
"""

from __future__ import annotations

import difflib
import json
import os
from typing import Any

import pytest
import yaml

from tests.unit.operator.build.examples import HERE, ON_RECORD, everything, example


def rendered(name: str) -> str:
    documents = everything(example(name))
    for document in documents:
        if document["kind"] == "ConfigMap":  # its text as what it says, so that a difference is one line
            document["data"] = {key: json.loads(text) for key, text in document["data"].items()}
    return yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=120)


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@pytest.mark.parametrize("name", ON_RECORD)
def test_children_are_those_on_record(name: str) -> None:
    file = HERE / "golden" / f"{name}.yaml"
    if os.environ.get("RLRUN_WRITE_GOLDEN"):
        file.write_text(rendered(name))
    lines = difflib.unified_diff(
        file.read_text().splitlines(), rendered(name).splitlines(), "on record", "rendered", n=6
    )
    difference = "\n".join(lines)
    assert not difference, f"{file.name}; if this is meant, write it anew with RLRUN_WRITE_GOLDEN=1:\n{difference}"
