"""Import hook of the stubs' processes: imports of torch and engines fail and faults are installed, as in the stub image."""

import os
import sys

for name in ("torch", "vllm"):
    sys.modules[name] = None  # type: ignore[assignment]

if os.environ.get("FAULT_POINTS"):
    import rlrun_faults

    rlrun_faults.install_or_exit()
