"""Where this folder is on `PYTHONPATH`, every process whose environment has `FAULT_POINTS` breaks at them (see `rlrun_faults`)."""

import os

if os.environ.get("FAULT_POINTS"):
    import rlrun_faults

    rlrun_faults.install_or_exit()
