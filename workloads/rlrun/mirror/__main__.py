"""Entry point of the process that copies a run."""

from __future__ import annotations

import sys

from rlrun.mirror.copy_process import main

if __name__ == "__main__":
    sys.exit(main())
