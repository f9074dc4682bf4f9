"""`python -m rlrun.evaluate --config run.json`: the orchestrator of a run of task Eval."""

import sys

from rlrun.evaluate.evaluation_role import main

if __name__ == "__main__":
    sys.exit(main())
