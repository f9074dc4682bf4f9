"""The main job on a fresh machine: a local cluster, the images of this checkout, `helm install`, `kubectl apply`, and a run that learns.

    python -m tests.cluster.demo [--name demo] [--down]

The bar is that of the local run: the reward of the last third of the steps is at least GAIN above that of the first five.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import api
from tests.cluster.deploy import install
from tests.cluster.follow import Outcome, follow
from tests.cluster.preparation.entry import RESUME, report_errors
from tests.cluster.preparation.prepare import prepare
from tests.cluster.progress import Progress, terminal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.yaml"
RUN = "quickstart"
GAIN = 0.2
RUN_SECONDS = 1200.0
IMAGES = ("operator", "trainer", "inference")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0 when the run is Complete and has learned."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="demo", help="name of the local cluster")
    parser.add_argument("--down", action="store_true", help="take the cluster down at the end")
    arguments = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return report_errors(lambda: _run(arguments), interrupted=RESUME)


def _run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f}s] {text}")

    say("programs of Kubernetes, and images of this checkout (the first time: many minutes)")
    progress = Progress(say, screen=terminal())
    built = prepare(progress, images=IMAGES, kwok=False)
    say("local cluster of two nodes")
    archives = [image.archive for image in built.values()]
    cluster = api.up(arguments.name, nodes=2, kwok=False, images=archives, progress=progress)
    cluster.load_image(*archives)
    try:
        say("helm install")
        install(cluster, {name: image.reference for name, image in built.items()})
        cluster.kubectl("delete", "rlrun", RUN, "--ignore-not-found", "--wait", timeout=120)
        cluster.kubectl("delete", "pvc", f"{RUN}-data", "--ignore-not-found", "--wait", timeout=120)
        say(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}")
        cluster.kubectl("apply", "-f", str(EXAMPLE))
        outcome = follow(cluster, RUN, timeout=RUN_SECONDS)
        say(f"{outcome.phase} {outcome.seconds:.0f} s after apply: {outcome.status.get('message', '')}")
        code = _judge(outcome)
    finally:
        if arguments.down:
            api.down(arguments.name)
    if not arguments.down:
        _look_around(cluster)
    return code


def _judge(outcome: Outcome) -> int:
    if outcome.phase != "Complete":
        return 1
    print(f"reward {outcome.start:.3f} -> {outcome.end:.3f} over {len(outcome.rewards)} steps")
    if outcome.held_out:
        (first, before), (last, after) = outcome.held_out[0], outcome.held_out[-1]
        print(f"held-out reward {before:.3f} (version {first}) -> {after:.3f} (version {last})")
    if outcome.end < outcome.start + GAIN:
        print(f"error: it has not learned: the reward should rise by at least {GAIN}")
        return 1
    return 0


def _look_around(cluster: api.Cluster) -> None:
    print(
        f"""
Look around:
  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.bin}:$PATH
  kubectl get rlr                              # phase, step, reward, pods
  kubectl describe rlr {RUN}              # conditions and events in words
  kubectl logs -l rlrun.io/run={RUN},rlrun.io/role=orchestrator --tail=5
  kubectl explain rlrun.spec.trainer           # the manifest's reference
Tear down:
  .venv/bin/python -m tests.cluster down --name {cluster.name}"""
    )


if __name__ == "__main__":
    sys.exit(main())
