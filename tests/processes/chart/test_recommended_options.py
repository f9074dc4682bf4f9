"""Table of options in `tests/unit/inspect` against kubectl and helm."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.unit.inspect.test_recommended_cluster_commands import KUBECTL, OPTIONS

_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][a-z-]*")


@pytest.mark.full
@pytest.mark.parametrize("program", OPTIONS)
def test_program_help_lists_each_option_of_table(program: str, helm: Path) -> None:
    tool = str(helm) if program == "helm" else shutil.which("kubectl")
    if tool is None:
        pytest.skip("no kubectl on PATH")
    everywhere = set() if program == "helm" else {*_OPTION.findall(run_program([tool, "options"]).stdout)}
    missing = {}
    for verb, options in OPTIONS[program].items():
        listed = {*_OPTION.findall(run_program([tool, *verb.split(), "--help"]).stdout)} | everywhere
        known = {*options.split(), *(KUBECTL.split() if program == "kubectl" else ())}
        if lacking := sorted(known - listed):
            missing[verb] = lacking
    assert missing == {}
