"""Choice of the attention kernel by machine, packages and model, and the error message if none is possible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rlrun.config.models.parallel import GPU_KERNELS, AttentionKernel
from rlrun.fit.attention_kernels import (
    BACKENDS,
    FA3,
    FA4,
    FEATURES,
    FLASH2,
    ORDER,
    AttentionError,
    Backend,
    Feature,
    Kernel,
    Machine,
    Needs,
    choose_kernel,
)
from tools import flash_attention_3

ROOT = Path(__file__).parents[3]
ALL: dict[Kernel, str] = {"fa3": "3.0.0", "fa4": "4.0.0b36", "flash2": "2.8.3"}
CPU = Machine("a CPU", None)
NOT_INSTALLED: dict[Kernel, str] = {
    "fa3": "flash_attn_interface is not installed",
    "fa4": "flash_attn.cute is not installed",
}


def gpu(major: int, minor: int = 0, *, packages: dict[Kernel, str] | None = None, **more: Any) -> Machine:
    return Machine("a GPU", (major, minor), ALL if packages is None else packages, **more)


def needs(*features: Feature, head_dim: int = 128) -> Needs:
    return Needs(frozenset(features), head_dim)


@pytest.mark.parametrize(
    ("machine", "demands", "expected"),
    [
        # Plain attention and windows (Qwen3, Mistral): the fastest.
        (gpu(9), needs(), "fa3"),
        (gpu(9), needs("window"), "fa3"),
        (gpu(9, packages={}), needs("window"), "varlen"),
        (gpu(10), needs("window"), "fa4"),
        (gpu(10, packages={}), needs(), "varlen"),
        # FlashAttention 2 is called where it is installed.
        (gpu(8), needs("window"), "flash2"),
        (gpu(8, 9), needs(), "flash2"),
        (gpu(12), needs(), "flash2"),
        (gpu(9, packages={"flash2": "2.8.3"}), needs(), "flash2"),
        (gpu(10, packages={"flash2": "2.8.3"}), needs(), "flash2"),
        (gpu(8, packages={}), needs("window"), "varlen"),
        (gpu(12, packages={}), needs(), "varlen"),
        (gpu(7), needs("window"), "sdpa"),
        (CPU, needs("window", "softcap", "sinks"), "sdpa"),
        # Soft caps (Gemma 2, heads of 256).
        (gpu(9), needs("window", "softcap", head_dim=256), "fa3"),
        (gpu(9, packages={"fa4": "4"}), needs("softcap", head_dim=256), "flex"),
        (gpu(9, packages={"flash2": "2.8.3"}), needs("softcap", head_dim=256), "flash2"),
        (gpu(8), needs("softcap", head_dim=256), "flash2"),
        (gpu(8, packages={}), needs("softcap", head_dim=256), "flex"),
        # Sinks (GPT-OSS, heads of 64).
        (gpu(9), needs("window", "sinks", head_dim=64), "fa3"),
        (gpu(9, packages={"flash2": "2.8.3"}), needs("sinks", head_dim=64), "varlen"),
        (gpu(8), needs("window", "sinks", head_dim=64), "varlen"),
        # Gemma 3 has windows and heads of 256; Gemma 4 heads of 512.
        (gpu(9, packages={}), needs("window", head_dim=256), "varlen"),
        (gpu(9), needs("window", head_dim=512), "sdpa"),
        # Open LLaMA 3B has heads of 100: torch's FlashAttention 2 refuses them, the package pads them.
        (gpu(8), needs(head_dim=100), "flash2"),
        (gpu(9, packages={}), needs(head_dim=100), "flex"),
        # Values of another size (DeepSeek), float32, rows that ranks share.
        (gpu(9), needs("value heads", head_dim=192), "flex"),
        (gpu(9), needs("float32"), "flex"),
        (gpu(9), needs("context"), "fa3"),
    ],
)
def test_auto_selects_first_suitable_kernel(machine: Machine, demands: Needs, expected: str) -> None:
    assert choose_kernel("auto", demands, machine).kernel == expected


def test_choice_explains_skipped_kernels() -> None:
    machine = gpu(9, packages={"fa3": "3.0.0"}, missing={"fa4": NOT_INSTALLED["fa4"]})
    assert str(choose_kernel("auto", needs("value heads", head_dim=64), machine)).startswith(
        "attention flex: flex is the first that a GPU (compute capability 9.0) and the model allow; "
        "not fa3: the model's attention has values of another head size than keys, which fa3 does not support; not fa4: "
    )
    found_later = machine.without_kernel("fa3", "it refuses this model's attention (RuntimeError: no cap)")
    assert str(choose_kernel("auto", needs(), found_later)) == (
        "attention varlen: varlen is the first that a GPU (compute capability 9.0) and the model allow; "
        "not fa3: it refuses this model's attention (RuntimeError: no cap); "
        "not fa4: flash_attn.cute is not installed (pip install 'flash-attn-4[cu13]==4.0.0b36')"
    )
    # flash-attn 2 is as fast as varlen, so its absence is no reason for a line in the log.
    assert str(choose_kernel("auto", needs(), gpu(8, packages={}))) == (
        "attention varlen: varlen is the first that a GPU (compute capability 8.0) and the model allow"
    )
    with pytest.raises(
        AttentionError, match=r"trainer\.attention \(fa3\): it refuses this model's attention \(RuntimeError"
    ):
        choose_kernel("fa3", needs(), found_later)
    assert str(choose_kernel("auto", needs(), machine)) == (
        "attention fa3: fa3 (flash-attn-3 3.0.0) is the first that a GPU (compute capability 9.0) and the model allow"
    )
    assert str(choose_kernel("flex", needs(), machine)) == "attention flex: flex is set by trainer.attention"


@pytest.mark.parametrize(
    ("asked", "machine", "demands", "told"),
    [
        (
            "fa3",
            gpu(9, packages={}, missing=NOT_INSTALLED),
            needs(),
            "trainer.attention (fa3): flash_attn_interface is not installed; install it where the trainer runs (make flash-attention-3",
        ),
        (
            "fa3",
            gpu(8),
            needs(),
            "trainer.attention (fa3): it needs a GPU of compute capability 9.x, but this is a GPU (compute capability 8.0); "
            "set attention: auto, or one of flash2, cudnn, varlen, flex, sdpa",
        ),
        (
            "varlen",
            gpu(9),
            needs("softcap", head_dim=256),
            "trainer.attention (varlen): the model's attention has soft-capped scores, which varlen does not support; "
            "set attention: auto, or one of fa3, flash2, flex, sdpa",
        ),
        (
            "cudnn",
            gpu(9),
            needs("window", "context"),
            "trainer.attention (cudnn): the model's attention has a sliding window and rows that ranks share (parallelism.cp), which",
        ),
        (
            "fa4",
            gpu(10),
            needs(head_dim=256),
            "fa4): the model's heads have 256 elements, but fa4 supports at most 128; set",
        ),
        (
            "varlen",
            gpu(8),
            needs(head_dim=100),
            "varlen): the model's heads have 100 elements, but varlen supports only multiples of 8; set attention: auto, or ",
        ),
        (
            "flash2",
            CPU,
            needs(),
            "flash2): it needs a GPU of compute capability 8.x to 12.x, but this is a CPU; set attention: auto",
        ),
    ],
)
def test_unsupported_kernel_is_refused_with_alternative(
    asked: Any, machine: Machine, demands: Needs, told: str
) -> None:
    with pytest.raises(AttentionError, match=re.escape(told)):
        choose_kernel(asked, demands, machine)


@pytest.mark.parametrize("asked", get_args(AttentionKernel))
@pytest.mark.parametrize("major", [None, 7, 8, 9, 10, 11, 12, 13])
@pytest.mark.parametrize("packages", [{}, ALL])
def test_selected_kernel_supports_requested_features(
    asked: Any, major: int | None, packages: dict[Kernel, str]
) -> None:
    machine = CPU if major is None else gpu(major, packages=packages)
    for feature in [None, *FEATURES]:
        demands = needs(*([feature] if feature else []))
        try:
            found = choose_kernel(asked, demands, machine).kernel
        except AttentionError:
            assert asked != "auto"
            continue
        backend = BACKENDS[found]
        assert asked in ("auto", found)
        assert demands.features <= backend.features
        assert backend.package is None or found in packages
        assert backend.capabilities is None or (
            major is not None and backend.capabilities[0] <= major <= backend.capabilities[1]
        )


def test_kernel_table_covers_configuration_values() -> None:
    assert set(BACKENDS) == set(get_args(AttentionKernel)) - {"auto"}
    assert {kernel for kernel, backend in BACKENDS.items() if backend.capabilities is not None} == set(GPU_KERNELS)
    assert all(kernels[-1] == "sdpa" for _, kernels in ORDER)
    assert BACKENDS["sdpa"].features == set(FEATURES)


def locked_version(file: str, package: str) -> str | None:
    found = re.search(rf"^{package}==(\S+)", (ROOT / "requirements" / file).read_text(), re.MULTILINE)
    return found[1] if found else None


def test_kernels_of_images_are_in_the_locks() -> None:
    """A kernel that the pages call installed is installed: by hash, in each image that trains."""
    images = ("images/common-gpu.txt", "images/trainer-gpu.txt", "images/inference-gpu.txt")
    held = {kernel for kernel, backend in BACKENDS.items() if backend.package and backend.package.locked is not None}
    assert held == {"fa3", "fa4"}
    for name in (*images, "gpu.txt", "local-gpu.txt"):
        version = locked_version(name, FA4.distributions[0])
        assert FA4.install == f"pip install 'flash-attn-4[cu13]=={version}'"
    assert {locked_version(name, FLASH2.distributions[0]) for name in images} == {None}
    release = locked_version("images/flash-attention-3.txt", "xformers")
    assert flash_attention_3.VERSION.endswith(f"+xformers.{release}")
    for image in ("trainer", "inference"):
        text = (ROOT / f"Dockerfile.{image}").read_text()
        assert "COPY --from=flash-attention-3 /opt/rlrun/lib /opt/rlrun/lib\n" in text
    makefile = (ROOT / "Makefile").read_text()
    assert f"\n{FA3.install.split()[1]}: install ##" in makefile


def test_page_contains_kernel_table() -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    rows = {row[0].strip("`"): row[1:] for row in cells if len(row) == 9}
    assert rows.keys() == BACKENDS.keys()
    told: tuple[Feature, ...] = ("window", "softcap", "sinks", "float32")
    for kernel, backend in BACKENDS.items():
        source, in_images, gpus, *able, head_dims, float32 = rows[kernel]
        assert in_images == _in_images(backend)
        assert [*able, float32] == ["yes" if feature in backend.features else "no" for feature in told]
        assert head_dims == ("any" if backend.head_dims is None else str(backend.head_dims))
        assert source.split("`")[1 if backend.package else 0] == (backend.package.module if backend.package else source)
        if backend.capabilities is not None:
            first, last = backend.capabilities
            assert gpus == (f"{first}.x" if first == last else f"{first}.x to {last}.x")
    for majors, kernels in ORDER:
        assert any(
            f"{majors[0]}.x" in line and line.endswith(f"| {', '.join(f'`{kernel}`' for kernel in kernels)} |")
            for line in page.splitlines()
        )


def _in_images(backend: Backend) -> str:
    if backend.package is None:
        return "yes"
    if backend.package.locked is None:
        return "no"
    names: dict[Feature, str] = {"softcap": "soft caps"}
    lacking = [names[feature] for feature in backend.features - backend.package.locked]
    return f"without {', '.join(lacking)}" if lacking else "yes"
