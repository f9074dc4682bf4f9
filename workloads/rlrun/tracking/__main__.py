"""Entry point of a run's sink."""

from __future__ import annotations

import sys

from rlrun.tracking.sink import main

if __name__ == "__main__":
    sys.exit(main())
