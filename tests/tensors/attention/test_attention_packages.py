"""Probes of attention packages: missing, incompatible and broken installations."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import sys
from typing import Any

import pytest
import torch

from rlrun.fit.attention_kernels import FA3, FA4, FLASH2, Package
from rlrun.trainer.modeling.attention import installed as machine_module
from rlrun.trainer.modeling.attention.installed import problem_of, read_machine
from tests.tensors.attention.stand_ins import package


@pytest.mark.parametrize("found", [FA3, FA4, FLASH2])
def test_pinned_package_signatures_are_accepted(found: Package, kernels: None) -> None:
    assert problem_of(found) is None


def test_missing_attention_package_is_named() -> None:
    assert problem_of(FA3) == "flash_attn_interface is not installed"
    assert problem_of(FA4) == "flash_attn.cute.interface is not installed"


def test_package_version_without_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_2023(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
    ) -> None:
        """Signature without windows and caps."""

    package("flash_attn", monkeypatch, flash_attn_varlen_func=of_2023, __version__="2.2.0")
    assert problem_of(FLASH2) == "flash_attn.flash_attn_varlen_func of version 2.2.0 does not take window_size, softcap"
    package("flash_attn", monkeypatch, __version__="3.9.9")
    assert problem_of(FLASH2) == "flash_attn 3.9.9 has no flash_attn_varlen_func"


class Broken(importlib.abc.MetaPathFinder):
    """Finder whose imports fail like libraries built for another torch or with a missing dependency."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "flash_attn_interface":
            raise ImportError("flash_attn_3/_C.abi3.so: undefined symbol: _ZN3c10\nmore")
        if name == "flash_attn":
            raise ModuleNotFoundError("No module named 'einops'", name="einops")


def test_package_import_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert problem_of(FA3) == (
        "flash_attn_interface cannot be imported (ImportError: flash_attn_3/_C.abi3.so: undefined symbol: _ZN3c10)"
    )
    assert problem_of(FLASH2) == "flash_attn needs einops, which is not installed"


def test_packages_are_probed_only_on_supported_gpus(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flash-attn-3": "3.0.0", "flash_attn_4": "4.0.0b4"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(machine_module.importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    found = {}
    for major in (8, 9, 10):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        read_machine.cache_clear()
        found[major] = read_machine(torch.device("cuda"))
    read_machine.cache_clear()
    assert found[8].versions == {"flash2": "2.8.3"}
    assert found[9].versions == {"fa3": "3.0.0", "fa4": "4.0.0b4", "flash2": "2.8.3"}
    assert found[10].versions == {"fa4": "4.0.0b4", "flash2": "2.8.3"}
    assert (found[9].name, found[9].capability, found[9].missing) == ("NVIDIA H100", (9, 0), {})
    assert read_machine(torch.device("cpu")).capability is None
