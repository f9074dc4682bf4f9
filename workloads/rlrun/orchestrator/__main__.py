"""`python -m rlrun.orchestrator --config run.json`."""

import sys

from rlrun.orchestrator.main import main

sys.exit(main())
