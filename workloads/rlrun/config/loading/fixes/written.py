"""Values as text of one line, to copy into a file."""

from __future__ import annotations

import json

import yaml

from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.yaml_text import parse_yaml


def to_yaml(value: object) -> str:
    """One line of YAML that reads as the value under both versions of the core schema."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    try:
        same = [one.value for one in parse_yaml(text, "")] == ([value] if value is not None else [])
    except ConfigError:
        same = False
    return text if same else json.dumps(value, ensure_ascii=False)


def to_toml(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {to_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(to_toml(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False)
