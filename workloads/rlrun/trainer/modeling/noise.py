"""Sources of randomness in a model's configuration: dropouts and router jitters."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedConfig, PreTrainedModel

_RANDOM = re.compile(r"dropout|drop_rate|pdrop|layerdrop|jitter")


def remove_noise(config: PreTrainedConfig) -> None:
    """Set every dropout and router jitter to 0, in place: log-probabilities must be deterministic."""
    set_noise(config, dict.fromkeys(read_noise(config), 0.0))


def read_noise(config: PreTrainedConfig) -> dict[str, float]:
    """Return the dropouts and router jitters above 0, by name; if several parts have the same name, the value of the last part."""
    return {
        name: value
        for part in config_parts(config)
        for name, value in vars(part).items()
        if isinstance(value, float) and value > 0 and _RANDOM.search(name)
    }


def set_noise(config: PreTrainedConfig, values: Mapping[str, float]) -> None:
    """Set dropouts and router jitters by name, in place, in every part that has them."""
    for part in config_parts(config):
        for name in values.keys() & vars(part).keys():
            setattr(part, name, values[name])


def config_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and all configurations inside of it, the outer one first."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for inner in nested for part in config_parts(inner))]


def remember_noise(model: PreTrainedModel, values: Mapping[str, float]) -> None:
    """Store the noise of a model's source (`read_noise`) at the model, because its configuration no longer has it."""
    model._noise = dict(values)


def source_noise(model: PreTrainedModel) -> dict[str, float]:
    """Return the stored noise of a model's source, or the noise of its configuration."""
    found: dict[str, float] = getattr(model, "_noise", None) or read_noise(model.config)
    return found
