from rlrun.runs.run import Run as Run
from rlrun.runs.spec_blocks import ManifestError as ManifestError
from rlrun.runs.spec_blocks import RunError as RunError
from rlrun.runs.spec_blocks import RunFailedError as RunFailedError
from rlrun.runs.spec_blocks import WaitTimeoutError as WaitTimeoutError

__version__: str
