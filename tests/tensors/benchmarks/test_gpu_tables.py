"""Decisions of the GPU benchmarks that need no GPU: tables, deadlines, fitting modes, kernel categories and torch
calls.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks.gpu import attention, kernels, pack_run, profile_step, signatures, steps
from benchmarks.gpu.memory import USABLE, fitting, needed
from benchmarks.gpu.profile_step import Kernel, summary
from benchmarks.gpu.results import STARTED, Deadline, Ended, Report, reason, run_limited
from benchmarks.gpu.shapes import QWEN3_06B, TINY, TINY_ROWS, attention_flops
from rlrun.config.models.parallel import ActivationCheckpointing
from rlrun.trainer.modeling.packed_attention import row_layout

ROOT = Path(__file__).parents[3]
PRESENT = {"torch", "transformers", "numpy", "safetensors", "yaml", "prometheus_client", "aiohttp", "pytest", "triton"}
BUNDLED = {
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "loguru": "loguru",
}
"""Packages on the GPU machine and in `pack.sh`: import name -> package."""


def test_report_writes_each_row_before_the_next(tmp_path: Path) -> None:
    report = Report(tmp_path, "t", "Title")
    report.put("a", "first", {"ms": 1.5, "right": True})
    report.begin("a", "second")
    text = (tmp_path / "t.md").read_text()
    assert text.splitlines()[-2:] == ["| first | 1.5 | yes | - |", f"| second | - | - | {STARTED} |"]
    again = Report(tmp_path, "t", "Title")
    assert again.has("a", "second")
    assert not again.has("a", "third")
    assert again.sections["a"]["first"] == {"ms": 1.5, "right": True}
    assert not Report(tmp_path, "t", "Title", fresh=True).sections


@pytest.mark.parametrize(
    ("program", "seconds", "told"),
    [
        ("import time; time.sleep(60)", 0.5, "stopped"),
        ("raise RuntimeError('x' * 9)", 60.0, "exit code 1: RuntimeError: xxxxxxxxx"),
        ("print('torch.OutOfMemoryError: CUDA out of memory. Tried'); raise SystemExit(1)", 60.0, "out of memory"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, "exit code -9"),
    ],
)
def test_process_end_is_reported_with_its_reason(program: str, seconds: float, told: str, tmp_path: Path) -> None:
    ended = run_limited([sys.executable, "-c", program], seconds, tmp_path / "log", {})
    assert told in reason(ended, seconds)


def test_stalled_process_is_stopped(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run_limited(sleeping, 60, tmp_path / "log", {}, lambda: True).code is None


def test_crashed_child_keeps_its_row_and_next_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def child(command: Any, *_: Any) -> Ended:
        report = Report(tmp_path, kernels.NAME, kernels.TITLE)
        started.append(command)
        report.begin("attention", f"row {len(started)}")
        return Ended(0 if len(started) == 3 else -11, "")

    monkeypatch.setattr(kernels, "run_limited", child)
    report = kernels.supervise(tmp_path, Deadline.after(60), [])
    assert list(report.sections["attention"]) == ["row 1", "row 2", "row 3"]
    monkeypatch.setattr(kernels, "run_limited", lambda *_: Ended(1, "ImportError: torch"))
    report = kernels.supervise(tmp_path, Deadline.after(60), [])
    assert report.sections["children that ended early"]["1"]["note"] == "exit code 1: ImportError: torch"


def test_fitting_mode_requires_checkpoints_for_large_rows() -> None:
    everything = ("none", "selective", "attention", "full")
    gib = {
        (tokens, mode, compiled): needed(QWEN3_06B, tokens, mode, compiled) / 2**30
        for tokens in (16_384, 65_536)
        for mode, compiled in (("none", False), ("none", True), ("full", False))
    }
    assert gib[16_384, "none", False] == pytest.approx(51, abs=1)
    assert gib[65_536, "none", False] == pytest.approx(141, abs=2)
    for compiled in (False, True):
        assert fitting(QWEN3_06B, 16_384, compiled=compiled, offered=everything) == "none"
        assert fitting(QWEN3_06B, 65_536, compiled=compiled, offered=everything) == "selective"
        assert fitting(QWEN3_06B, 65_536, compiled=compiled, offered=("none", "full")) == "full"
    assert fitting(QWEN3_06B, 65_536, compiled=False, offered=("none",)) is None


OWN = [step for step in (*steps.LADDER, *steps.TINY_LADDER) if step.task != steps.TRL]


@pytest.mark.parametrize("step", OWN, ids=lambda step: step.name)
@pytest.mark.parametrize("best", [{}, {"compile": True}])
def test_step_configurations_are_valid_and_fit_memory(step: Any, best: dict[str, Any], tmp_path: Path) -> None:
    fields = best if step.best else step.fields
    config = steps.configuration(step, QWEN3_06B, tmp_path, gpus=1, fields=fields)
    assert needed(QWEN3_06B, step.tokens, config.activation_checkpointing, config.compile) <= USABLE
    assert step.tokens < 65_536 or config.activation_checkpointing != "none"
    assert config.activation_checkpointing in get_args(ActivationCheckpointing)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["hidden_size"] == 1024


def test_value_unknown_to_this_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attention fa9 is no value of this version"):
        steps.configuration(steps.LADDER[0], QWEN3_06B, tmp_path, gpus=1, fields={"attention": "fa9"})


def test_best_fields_come_from_fastest_single_row(tmp_path: Path) -> None:
    report = Report(tmp_path, "steps", "")
    assert steps.best_fields(report) == {}
    rows: dict[str, dict[str, Any]] = {
        "RL 16k, eager": {"tokens/s": 5.0, "rows": 1, "fields": {}},
        "RL 16k, compiled": {"tokens/s": 9.0, "rows": 1, "fields": {"compile": True}},
        "RL 16k, fa3": {"rows": 1, "fields": {"attention": "fa3"}, "note": "out of memory"},
        "RL 16k, best, 2 rows": {"tokens/s": 99.0, "rows": 2, "fields": {"x": 1}},
        "SFT 16k, eager": {"tokens/s": 99.0, "rows": 1, "fields": {"y": 1}},
    }
    for name, row in rows.items():
        report.put(steps.SECTION, name, row)
    assert steps.best_fields(report) == {"compile": True}


def test_rows_after_the_deadline_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "measure", lambda *_, **__: pytest.fail("measured after the deadline"))
    report = Report(tmp_path, "steps", "")
    steps.measure_all(report, steps.LADDER, tmp_path, dry=True, deadline=Deadline.after(-1))
    assert {row["note"] for row in report.sections[steps.SECTION].values()} == {"left out: no time"}
    assert len(report.sections[steps.SECTION]) == len(steps.LADDER)


def test_step_time_is_divided_into_categories() -> None:
    found = summary(
        [
            Kernel("flash_fwd_kernel", 0, 400),
            Kernel("nvjet_tst_128x256", 400, 600),
            Kernel("nvjet_tst_128x256", 600, 700, head=True),
            Kernel("triton_poi_fused_silu", 650, 750),  # overlaps the previous kernel
            Kernel("multi_tensor_apply_kernel", 900, 950),
            Kernel("Memcpy DtoH", 950, 960),
            Kernel("vectorized_elementwise_kernel", 960, 1000),
        ],
        (0, 1000),
    )
    shares = {name: row["% of step"] for name, row in found["categories"].items()}
    assert shares == {
        "attention": 40,
        "GEMM": 20,
        "LM head": 10,
        "fused": 10,
        "optimizer": 5,
        "eager rest": 4,
        "copies": 1,
        "idle": 15,
        "step": 100,
    }
    assert found["longest"]["nvjet_tst_128x256"] == {"ms": 0.3, "% of step": 30, "launches": 2}


def test_head_kernels_are_found_by_their_parent() -> None:
    def event(name: str, begin: float, end: float, parent: Any = None, device: str = "CPU", started: Any = ()) -> Any:
        return types.SimpleNamespace(
            name=name,
            time_range=types.SimpleNamespace(start=begin, end=end),
            cpu_parent=parent,
            device_type=f"DeviceType.{device}",
            kernels=[types.SimpleNamespace(name=one, duration=length) for one, length in started],
            is_user_annotation=False,
        )

    head = event("_HeadStatisticsBackward", 0, 9)
    events = [
        head,
        event("aten::mm", 1, 2, head, started=[("nvjet", 30.0)]),
        event("aten::mm", 3, 4, started=[("nvjet", 50.0)]),
        event("nvjet", 100, 130, device="CUDA"),
        event("nvjet", 130, 180, device="CUDA"),
    ]
    assert [kernel.category for kernel in profile_step.kernels_of(events, cuda=True)] == ["LM head", "GEMM"]
    assert [kernel.category for kernel in profile_step.kernels_of(events, cuda=False)] == ["LM head", "GEMM"]


@pytest.mark.parametrize("lengths", TINY_ROWS.values(), ids=TINY_ROWS)
def test_attention_errors_use_an_equal_reference(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, TINY.head_dim) for heads in (4, 2, 2))
    row = row_layout(lengths, q.device)
    found = attention.KERNELS["sdpa"](q, k, v, row)
    if len(set(lengths)) == 1:
        torch.testing.assert_close(attention.of_one_length(q, k, v, lengths), found, atol=1e-5, rtol=1e-5)
    for name in attention.NAMES[:-1]:
        with pytest.raises(attention.UnavailableError, match=rf"trainer.attention \({name}\): it needs a GPU"):
            attention.KERNELS[name](q, k, v, row)


def test_attention_flops_match_the_paper() -> None:
    assert [28 * work / 1e12 for work in attention_flops(QWEN3_06B, (65_536,))] == pytest.approx(
        [492.6, 1231.5], rel=1e-3
    )


def test_torch_calls_bind_in_both_versions() -> None:
    old = json.loads(signatures.TABLE.read_text())
    stubs = signatures.builtin_stubs()
    seen, wrong = 0, []
    for call in signatures.calls(signatures.callers()):
        if call.function in signatures.SEVERAL_RANKS:
            continue
        if call.function not in old:
            wrong.append(f"{call.where}: torch {signatures.VERSION} has no {call.function}; or make the table again")
            continue
        for version, overloads in (
            ("2.11", old[call.function]),
            ("installed", signatures.signatures(call.function, stubs)),
        ):
            if overloads is not None:
                seen += 1
                if not signatures.binds(call, overloads):
                    wrong.append(f"{call.where}: {call.function} of torch {version} takes {overloads}")
    assert not wrong, "\n".join(wrong)
    assert seen > 400


def test_keyword_of_one_version_does_not_bind() -> None:
    taken = json.loads(signatures.TABLE.read_text())
    call = signatures.Call("torch._inductor.compile_fx.compile_fx", "x", 2, ("inner_compile", "newer"), False)
    assert not signatures.binds(call, taken[call.function])
    assert signatures.binds(signatures.Call(call.function, "x", 2, ("inner_compile",), False), taken[call.function])
    assert not signatures.binds(signatures.Call(call.function, "x", 1, (), False), taken[call.function])
    product = signatures.Call("torch.mm", "x", 2, ("out_dtype",), False)
    assert signatures.binds(product, taken["torch.mm"])
    assert not signatures.binds(signatures.Call("torch.mm", "x", 2, ("dtype",), False), taken["torch.mm"])


def test_measured_modules_import_only_packed_packages() -> None:
    found = _packages(
        ["rlrun.trainer.__main__", "rlrun.trainer.bench", *_modules("benchmarks/gpu"), *_modules("tests/gpu")]
    )
    assert "torch" in found, "the imports were followed"
    strangers = {name: files for name, files in found.items() if name not in PRESENT | BUNDLED.keys()}
    assert not strangers
    packed = (ROOT / "benchmarks/gpu/pack.sh").read_text()
    assert all(f"$(pin {package})" in packed for package in BUNDLED.values())


def test_complete_run_imports_only_packages_of_its_packs_and_of_the_machine() -> None:
    machine = re.findall(r"^([a-z][a-z0-9-]*)", (ROOT / "benchmarks/gpu/machine.txt").read_text(), re.MULTILINE)
    available = {name.replace("-", "_") for name in (*machine, *pack_run.PACKAGES, "vllm")} | IMPORTED_AS.keys()
    programs = ["rlrun.cli.main", "rlrun.local.local_command", "rlrun.inference.__main__", "rlrun.orchestrator.main"]
    found = _packages([*programs, "rlrun.trainer.__main__", *COMPLETE_RUN])
    assert {"torch", "msgspec"} <= found.keys(), "the imports were followed"
    assert {name: files for name, files in found.items() if name not in available} == {}


COMPLETE_RUN = [
    f"benchmarks.gpu.{file.stem}"
    for file in (ROOT / "benchmarks/gpu").glob("*.py")
    if file.stem.startswith("run_") or file.stem in ("check_pack", "pack_run")
]
"""Modules of the complete run, whose packages come in packs of their own."""
IMPORTED_AS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}


def _modules(folder: str) -> list[str]:
    found = [f"{folder.replace('/', '.')}.{file.stem}" for file in (ROOT / folder).glob("*.py")]
    return [module for module in found if module not in COMPLETE_RUN]


def _packages(modules: list[str]) -> dict[str, set[str]]:
    """Return the external packages that these modules and their own imports load, with the importing files."""
    found: dict[str, set[str]] = {}
    seen: set[str] = set()
    while modules:
        module = modules.pop()
        file = _file(module)
        if module in seen or file is None:
            continue
        seen.add(module)
        for name in _loaded(ast.parse(file.read_text()).body):
            top = name.partition(".")[0]
            if top in ("rlrun", "benchmarks", "tests"):
                modules += [name, name.rpartition(".")[0]]
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, set()).add(module)
    return found


def _file(module: str) -> Path | None:
    path = ROOT / ("workloads" if module.startswith("rlrun") else "") / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _loaded(body: list[ast.stmt]) -> list[str]:
    found = []
    for node in body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Try | ast.If) and "TYPE_CHECKING" not in ast.unparse(node).partition("\n")[0]:
            found += _loaded([*node.body, *node.orelse])
    return found
