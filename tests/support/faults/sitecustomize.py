"""Hook for processes with this folder on `PYTHONPATH`: those with `FAULT_POINTS` in their environment get these faults
(see `rlrun_faults`)."""

import os

if os.environ.get("FAULT_POINTS"):
    import rlrun_faults

    rlrun_faults.install_or_exit()
