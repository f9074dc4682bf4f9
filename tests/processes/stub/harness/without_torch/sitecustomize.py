"""On the path of the stubs' processes: importing torch or an engine fails there, as in the stub image."""

import sys

for name in ("torch", "vllm"):
    sys.modules[name] = None  # type: ignore[assignment]
