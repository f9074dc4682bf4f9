"""On the path of the stubs' processes: importing torch or an engine fails there, as in the stub image. Faults are installed as there."""

import os
import sys

for name in ("torch", "vllm"):
    sys.modules[name] = None  # type: ignore[assignment]

if os.environ.get("FAULT_POINTS"):
    import rlrun_faults

    rlrun_faults.install_or_exit()
