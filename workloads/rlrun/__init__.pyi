from rlrun.runs.blocks import ManifestError as ManifestError
from rlrun.runs.blocks import RunError as RunError
from rlrun.runs.blocks import RunFailedError as RunFailedError
from rlrun.runs.blocks import WaitTimeoutError as WaitTimeoutError
from rlrun.runs.run import Run as Run

__version__: str
