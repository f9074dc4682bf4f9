"""`python -m tests.e2e.story [--write]`: the queue story on a cluster of two nodes, with its events as a page."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import api
from tests.cluster.images import build
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.story.play import NAMESPACE, STEP_SECONDS, Story, installed
from tests.e2e.story.told import read, table

PAGE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "queue_story.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the story and print it; with `--write` update the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.story", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--cluster", help="a native cluster of two nodes that is up; default: an own one")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # take the cluster down first
    images = build(["operator", "stub"])
    archives = [image.archive for image in images.values()]
    given = options.cluster
    cluster = api.attach(given) if given else api.up("story", nodes=2, images=archives, tie=True)
    if not isinstance(cluster, NativeCluster):
        parser.error(f"cluster {cluster.name} comes from {cluster.provider}: its machines cannot be broken")
    stub = images["stub"].reference
    references = {"trainer": stub, "inference": stub, "operator": images["operator"].reference}
    try:
        cluster.load_image(*archives)
        with installed(cluster, references):
            Story(cluster, stub).play()
            text = page(table(read(cluster, NAMESPACE)))
    finally:
        if not given:
            cluster.down()
    print(text)
    if options.write:
        PAGE.write_text(text)
    return 0


def page(events: str) -> str:
    """Return the page with a table of events."""
    return f"""# Three runs and room for one, a fourth of higher priority, a node that is lost

`python -m tests.e2e.story --write`, played on {time.strftime("%Y-%m-%d")}: a real cluster of two nodes on one machine, one GPU on
each (by name only), the operator with its own queue. Each run is a trainer of two pods with a GPU each, a stub with a step every
{STEP_SECONDS} s, a stub engine and the real orchestrator. `urgent` has priority 10 and an elastic trainer of one pod at least,
which waits 5 s for a node. The node's power is cut while it trains, and comes back once it trains with one pod.

All that the API server has of it: events of the runs (`kubectl get events`), and of the nodes when they go and come. Seconds count
from the first. The test that plays it holds that never more than one run has pods with a GPU, that the run which was preempted has
lost no step and goes on from the step at which it stopped, and that the loss of a node does not count as a restart.

{events}"""


if __name__ == "__main__":
    raise SystemExit(main())
