"""A program of the package as pip installs it: `python -m tests.support.entry_point NAME MODULE:FUNCTION [WORD...]`."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    name, target, *words = sys.argv[1:]
    module, _, function = target.partition(":")
    sys.argv = [name, *words]
    sys.exit(getattr(importlib.import_module(module), function)())
