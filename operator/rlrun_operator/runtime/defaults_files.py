"""Files of the mounted ConfigMap with defaults for runs: one file per key, updated by the kubelet about a minute after an edit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rlrun.defaults.team_defaults import read_defaults
from rlrun_operator.state import TeamDefaults

EVERYWHERE = "defaults.yaml"
"""Key for all namespaces; `defaults.NAMESPACE.yaml` replaces it for one namespace."""
log = logging.getLogger(__name__)


class DefaultsFiles:
    """Defaults for runs by namespace; the empty name stands for all other namespaces.

    Args:
        folder: mount path of the ConfigMap; None: no defaults.
        config_map: `NAMESPACE/NAME` of the ConfigMap.
    """

    def __init__(self, folder: Path | None, config_map: str) -> None:
        self._folder = folder
        self._config_map = config_map
        self._texts: dict[str, str] = {}
        self.current: Mapping[str, TeamDefaults] = {}

    def reload_files(self) -> bool:
        """Read the files again. Returns whether they have changed."""
        texts = self._read_texts()
        if texts == self._texts:
            return False
        self._texts = texts
        found: dict[str, TeamDefaults] = {}
        for key, text in texts.items():
            middle = key.removeprefix("defaults").removesuffix(".yaml").strip(".")
            found[middle] = read_defaults(text, self._config_map, key)
            if found[middle].problems:
                log.error("no attempt starts with these defaults: %s", found[middle].problems)
        self.current = found
        return True

    def _read_texts(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        texts: dict[str, str] = {}
        try:
            for path in sorted(self._folder.iterdir()):
                if path.name == EVERYWHERE or (path.name.startswith("defaults.") and path.name.endswith(".yaml")):
                    texts[path.name] = path.read_text(errors="replace")
        except FileNotFoundError:  # no ConfigMap, or the kubelet is renewing it
            return texts
        except OSError as error:
            log.warning("cannot read the defaults in %s, so the previous ones stay in effect: %s", self._folder, error)
            return self._texts
        return texts
