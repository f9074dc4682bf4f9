"""Calls of the attention packages, compared with their published wheels, which are fetched by hash."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.fit.attention_kernels import FA3, FA4
from rlrun.trainer.modeling.attention.compute import attend
from rlrun.trainer.modeling.attention.packed_layout import Scores, row_layout
from tests.support.published_wheels import (
    EARLIER_BETAS,
    flash_attention_3_sources,
    flash_attention_4,
    locked_flash_attention_4,
)
from tests.support.python_path import before
from tests.tensors.attention import stand_ins
from tools import flash_attention_3

FIRST = {"_flash_attn_fwd": ("q", "k", "v"), "_flash_attn_bwd": ("q", "k", "v", "out", "dout", "lse")}
"""Positional arguments of our calls."""
RESULTS = {"_flash_attn_fwd": 2, "_flash_attn_bwd": 3}
"""Number of results that our calls use."""
LOCKED = locked_flash_attention_4()[0]
PROBE = """
import json, torch
from rlrun.fit.attention_kernels import FA3
from rlrun.trainer.modeling.attention.installed import problem_of, version_of
problem = problem_of(FA3)
names = [name for name in FA3.operations if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
print(json.dumps([problem, version_of(FA3), names]))
"""


def function_of(version: str, name: str) -> ast.FunctionDef:
    """Return a function of a published release."""
    path = flash_attention_4(version) / FA4.module.replace(".", "/")
    tree = ast.parse(path.with_suffix(".py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def returned(function: ast.FunctionDef) -> list[int]:
    """Return the number of values of each return statement, without those of functions inside."""
    pending: list[ast.AST] = [*function.body]
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Return):
            values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            assert all(isinstance(value, ast.Tuple) for value in values), ast.unparse(node)
            found += [len(value.elts) for value in values if isinstance(value, ast.Tuple)]
        pending += ast.iter_child_nodes(node)
    return found


def our_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, set[str]]]:
    """Return the number of positional arguments and the keywords of our calls."""
    seen: dict[str, tuple[int, set[str]]] = {}

    def recorded(name: str, function: Any) -> Any:
        def call(*inputs: Any, **options: Any) -> Any:
            seen[name] = (len(inputs), set(options))
            return function(*inputs, **options)

        return call

    stand_ins.install(monkeypatch)
    module = sys.modules[FA4.module]
    for name in FIRST:
        monkeypatch.setattr(module, name, recorded(name, getattr(module, name)))
    leaves = [torch.randn(5, heads, 8).requires_grad_() for heads in (2, 1, 1)]
    layout = row_layout((3, 2), torch.device("cpu")).segments
    output = attend("fa4", leaves[0], leaves[1], leaves[2], layout, Scores(0.3, window=2))
    torch.autograd.grad(output.sum(), leaves)
    return seen


@pytest.mark.parametrize(
    "version", [LOCKED, *(pytest.param(version, marks=pytest.mark.full) for version in EARLIER_BETAS)]
)
def test_flash_attention_4_calls_fit_published_wheel(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = our_calls(monkeypatch)
    assert calls.keys() == FA4.functions.keys()
    for name, (positional, keywords) in calls.items():
        function = function_of(version, name)
        arguments = [argument.arg for argument in function.args.args]
        assert keywords == set(FA4.functions[name]), "the probe of installed packages reads this table"
        assert keywords <= {*arguments, *(argument.arg for argument in function.args.kwonlyargs)}
        assert tuple(arguments[:positional]) == FIRST[name]
        required = set(arguments[: len(arguments) - len(function.args.defaults)])
        assert required <= {*FIRST[name], *keywords}, "an argument without a default is missing in our call"
        counts = returned(function)
        assert counts
        assert min(counts) >= RESULTS[name]


def test_locked_beta_returns_more_values_than_used() -> None:
    """An adapter that unpacks exactly two values fails with this release."""
    assert set(returned(function_of(LOCKED, "_flash_attn_fwd"))) == {5}
    assert set(returned(function_of(LOCKED, "_flash_attn_bwd"))) == {3, 4}


@pytest.mark.full
def test_flash_attention_3_wheel_loads_with_installed_torch(tmp_path: Path) -> None:
    """The library of the images loads without a GPU, and its operations have the arguments of our calls."""
    files = flash_attention_3.hopper_files(flash_attention_3_sources())
    wheel = flash_attention_3.write_wheel(files, tmp_path / "a")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == flash_attention_3.SHA256
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-cache", "--python", sys.executable]
    subprocess.run([*command, "--target", tmp_path / "site", wheel], check=True)
    wheel.unlink()
    environment = os.environ | {"PYTHONPATH": before(tmp_path / "site")}
    probed = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    problem, version, on_gpu = json.loads(probed.stdout.splitlines()[-1])
    assert problem is None
    assert version == flash_attention_3.VERSION
    assert on_gpu == list(FA3.operations)
