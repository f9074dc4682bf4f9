"""Missing packages on this machine do not make a manifest invalid: the check is reported as skipped."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from rlrun.config.models.data import DataConfig
from rlrun.local.read_inputs import check_data


@pytest.mark.parametrize(("here", "notice"), [(False, True), (True, False)])
def test_rows_that_need_a_missing_package(
    here: bool, notice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.parquet"
    rows.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    data = DataConfig.model_validate({"sources": [{"path": str(rows)}]})
    (found,) = check_data(data, here=here)
    assert found.notice is notice
    assert "pyarrow" in found.message
    assert ("is not checked on this machine" in found.message) is notice


def test_template_of_the_tiny_model_needs_no_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "rlrun.trainer.modeling.character_tokenizer"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert "<assistant>" in importlib.import_module(name).CHAT_TEMPLATE
