"""Objects as YAML text, as files and `rlrun crd` have them."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors: equal values are written out each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(*documents: dict[str, Any]) -> str:
    """The documents in their order, with `---` between them."""
    return "---\n".join(_text(document) for document in documents)


def _text(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
