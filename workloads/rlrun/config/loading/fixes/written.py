"""Values as one line of text, to copy into a file."""

from __future__ import annotations

import json

import yaml

from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.yaml_text import parse_yaml


def to_yaml(value: object) -> str:
    """Return one line of YAML that versions 1.1 and 1.2 of the core schema read as the value."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    try:
        same = [document.value for document in parse_yaml(text, "")] == ([value] if value is not None else [])
    except ConfigError:
        same = False
    return text if same else json.dumps(value, ensure_ascii=False)


def to_toml(value: object) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {to_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
