"""`trainer.elastic` on one machine, and its conflicts with other fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.local.model_sizes import elastic_notice


def spec(trainer: dict[str, Any], **blocks: Any) -> RLRunSpec:
    base: dict[str, Any] = {"model": {"path": "m"}, "environments": [{"id": "reverse-text"}]}
    return RLRunSpec.model_validate(base | {"trainer": {"replicas": 4} | trainer} | blocks)


def test_elastic_on_one_machine_uses_all_pods_with_notice() -> None:
    run = spec({"elastic": {"min": 2}, "parallelism": {"tp": 2}})
    (notice,) = elastic_notice(run)
    assert (notice.key, notice.notice) == (("trainer", "elastic"), True)
    assert (
        "the trainer may have 2, 4 pods, not 3: parallelism: pp * dpReplicate * cp * tp (2) must divide"
        in notice.message
    )
    assert "on one machine it has replicas (4)" in notice.message
    assert list(elastic_notice(spec({}))) == []
    assert resolve_spec(run, name="run", uid="uid", output_dir="/out").trainer.replicas == 4


@pytest.mark.parametrize(
    ("trainer", "blocks", "words"),
    [
        ({"elastic": {"min": 5}}, {}, "must be at most replicas"),
        ({"elastic": {"min": 3}, "parallelism": {"tp": 2}}, {}, "gives 3 ranks"),
        ({"elastic": {"min": 2}, "parallelism": {"ep": 4}}, {}, "gives 2 ranks"),
        ({"elastic": {}, "parallelism": {"dpShard": 4}}, {}, "fixes; remove one of them"),
        ({"elastic": {}, "lora": {"slots": 2}}, {}, "which interrupt other runs that lora.slots"),
        ({"elastic": {}}, {"checkpoint": {"enabled": False}}, "checkpoint.enabled is false"),
        (
            {"elastic": {}},
            {"placement": {"colocate": True}, "algorithm": {"maxAsyncLevel": 0}},
            "engines into the trainer's pods",
        ),
        ({"replicas": 1, "elastic": {}, "sharedWith": "host", "lora": {}}, {}, "is set by the host"),
        ({"replicas": 1, "elastic": {}}, {"task": "Eval"}, "applies only to tasks that train; remove it"),
    ],
)
def test_elastic_with_fixed_size_is_refused(trainer: dict[str, Any], blocks: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        spec(trainer, **blocks)
    assert "elastic" in str(caught.value)
