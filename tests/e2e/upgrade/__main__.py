"""`python -m tests.e2e.upgrade [--from COMMIT]`: upgrade from an earlier release and rollback, with runs in all phases.

The earlier release is a commit of this repository, so the clone needs its history. CI does not run this, because its
clone may have none.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import api
from tests.cluster.progress import Progress
from tests.e2e.upgrade.play import Play
from tests.e2e.upgrade.release import exported, present

EARLIER = "e3c4c31"
"""Last commit before repairs of runs' small objects, and before claims could grow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the trial; return 1 if an exchange changed or reported anything unexpected."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.upgrade", description=__doc__)
    parser.add_argument("--from", dest="earlier", default=EARLIER, metavar="COMMIT", help="default: %(default)s")
    parser.add_argument("--cluster", help="a cluster of two nodes that is up; default: an own one")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # take the cluster down first
    say = Progress()
    with tempfile.TemporaryDirectory(prefix="rlrun-upgrade-") as name:
        folder = Path(name)
        old, new = exported(options.earlier, folder, say), present(say)
        archives = [image.archive for release in (old, new) for image in release.images.values()]
        given = options.cluster is not None
        cluster = api.attach(options.cluster) if given else api.up("upgrade", nodes=2, images=archives, tie=True)
        try:
            if given:
                cluster.load_image(*archives)
            play = Play(cluster, old, new, folder, say)
            play.all()
        finally:
            if not given:
                cluster.down()
    for problem in play.problems:
        print(f"PROBLEM {problem}")
    say(f"{len(play.problems)} problems")
    return int(bool(play.problems))


if __name__ == "__main__":
    raise SystemExit(main())
