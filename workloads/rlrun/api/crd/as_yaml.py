"""Objects as YAML text, for files and for `rlrun crd`."""

from __future__ import annotations

from collections.abc import Mapping

import yaml


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors: equal values are written out every time."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def as_yaml(*documents: Mapping[str, object]) -> str:
    """Return the documents in order as YAML, separated by `---`."""
    return "---\n".join(_yaml_text(document) for document in documents)


def _yaml_text(document: Mapping[str, object]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
