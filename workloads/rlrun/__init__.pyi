from rlrun.runs.errors import ManifestError as ManifestError
from rlrun.runs.errors import RunError as RunError
from rlrun.runs.errors import RunFailedError as RunFailedError
from rlrun.runs.errors import WaitTimeoutError as WaitTimeoutError
from rlrun.runs.run import Run as Run

__version__: str
