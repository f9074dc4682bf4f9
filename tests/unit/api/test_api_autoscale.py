"""`inference.autoscale` on one machine, and its conflicts with other fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.local.model_sizes import autoscale_notice

ELASTIC = {"autoscale": {"min": 2, "max": 4}}


def spec(**blocks: Any) -> RLRunSpec:
    base: dict[str, Any] = {"model": {"path": "m"}, "environments": [{"id": "reverse-text"}]}
    return RLRunSpec.model_validate(base | {"inference": ELASTIC} | blocks)


def test_autoscale_on_one_machine_uses_minimum_with_notice() -> None:
    (notice,) = autoscale_notice(spec())
    assert (notice.key, notice.notice) == (("inference", "autoscale"), True)
    assert "always has autoscale.min (2) engines" in notice.message
    assert list(autoscale_notice(spec(inference={"replicas": 2}))) == []
    engines = resolve_spec(spec(), name="run", uid="uid", output_dir="/out").inference
    assert engines is not None
    assert engines.replicas == 2


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (
            {"placement": {"colocate": True}, "algorithm": {"maxAsyncLevel": 0}},
            "applies only to engines with their own pods",
        ),
        ({"task": "Eval"}, "applies only to tasks that train; remove it"),
        ({"trainer": {"sharedWith": "host", "lora": {}}}, "is set by the host"),
        ({"trainer": {"lora": {"slots": 2}}}, "measures only this run's load"),
        ({"allocation": "vllm:d4+fsdp:d4"}, "cannot be set with autoscale"),
    ],
)
def test_autoscale_without_variable_engines_is_refused(blocks: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        spec(**blocks)
    assert "autoscale" in str(caught.value)
