"""torchrun, whose exit code is that of the first rank that failed: `python -m rlrun.trainer.torchrun <torchrun's arguments>`.

torchrun itself ends with 1 whatever happened, and prints a table of failures after the message that a person looks for. Who restarts the
group needs to know whether that can help (`protocol.exit_codes`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rlrun.protocol import stacks

_SIGNALLED = 128


def main(argv: Sequence[str]) -> int:
    """Run torchrun; returns the exit code: 128 + n when signal n ended a rank or this process."""
    stacks.listen()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        run(parse_args(list(argv)))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = int(failure.exitcode)
        return code if code > 0 else _SIGNALLED - code
    except SignalException as error:
        return _SIGNALLED + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
