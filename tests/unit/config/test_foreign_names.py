"""Choices by the names of other libraries: the message has RLRun's name."""

from __future__ import annotations

import pytest

from rlrun.api.run_manifest import parse_manifest
from rlrun.config.loading.fixes.closest_values import closest_scalars
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.schema import Shape, field_shapes
from rlrun.config.models.learning import RegularizerConfig
from rlrun.convert.tables.verl_keys import AGGREGATIONS, KL_REWARD_KINDS, OPTIMIZERS

MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {{name: quick}}
spec:
  model: {{tiny: {{}}}}
  environments: [{{id: reverse-text}}]
  trainer: {{attention: "{name}"}}
"""


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("flash_attention_2", "flash2"),
        ("flash_attention_3", "fa3"),
        ("flash_attention_4", "fa4"),
        ("kernels-community/flash-attn3", "fa3"),
        ("eager", "sdpa"),
        ("flex_attention", "flex"),
        ("olmo3_sink", "auto"),
        ("fa2", "flash2"),
    ],
)
def test_attention_by_foreign_name_is_corrected(name: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(MANIFEST.format(name=name), "run.yaml")
    assert str(caught.value).startswith(f'run.yaml:7: spec.trainer.attention: got "{name}" ')
    assert str(caught.value).endswith(f"; write attention: {ours}")


def test_foreign_name_is_suggested_only_for_fields_with_its_value() -> None:
    assert [*closest_scalars("eager", Shape("choice", choices=("greedy", "beam")), "sampler")] != ["sdpa"]
    assert [*closest_scalars("eager", Shape("choice", choices=("eagre",)), "mode")] == ["eagre"]


def test_suggestions_agree_with_conversion_of_verl() -> None:
    regularizers = field_shapes(RegularizerConfig)["kl_kind"]
    names = {**AGGREGATIONS, **OPTIMIZERS, **{name: KL_REWARD_KINDS[name] for name in ("mse", "low_var_kl")}}
    for name, ours in names.items():
        choices = regularizers.choices if ours.startswith("k") else tuple(names.values())
        assert [*closest_scalars(name, Shape("choice", choices=choices), "field")][:1] == [ours], name
