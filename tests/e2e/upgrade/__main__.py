"""`python -m tests.e2e.upgrade [--from COMMIT]`: runs in all phases live through an upgrade from an earlier release, and the way back.

The earlier release is a commit of this repository, so a clone with its history is needed: it is no part of CI, whose clone may have none.
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
"""Last commit before runs' small objects were repaired, and before claims grew."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play; 1 when something was touched or said that should not have been."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.upgrade", description=__doc__)
    parser.add_argument("--from", dest="earlier", default=EARLIER, metavar="COMMIT", help="default: %(default)s")
    parser.add_argument("--cluster", help="a cluster of two nodes that is up; default: an own one")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster is taken down first
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
