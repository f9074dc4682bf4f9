"""The main job on a new machine: a local cluster, the images of this checkout, `helm install`, `kubectl apply`, and a
run that learns.

    python -m tests.cluster.demo [--name demo] [--provider native] [--stubs] [--down]

The limit is that of the local run: the reward of the last third of the steps is at least GAIN above that of the first
five. With `--stubs`, trainer and engines are stubs, which need a small image and seconds, and the run only has to
complete. The demo needs only Python: nothing of this project has to be installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster import api
from tests.cluster.deploy import RELEASE, SYSTEM, install
from tests.cluster.errors import ClusterError
from tests.cluster.follow import Outcome, follow
from tests.cluster.images import BuiltImage
from tests.cluster.preparation.entry import RESUME, report_errors
from tests.cluster.preparation.prepare import prepare
from tests.cluster.progress import Progress, Say, terminal
from tests.cluster.provider import PROVIDERS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.yaml"
RUN = "quickstart"
NODES = 2
GAIN = 0.2
RUN_SECONDS = 1200.0
REAL_IMAGES = ("operator", "trainer", "inference")
STUB_IMAGES = ("operator", "stub")
STUB_SPEC: dict[str, dict[str, Any]] = {
    "trainer": {"gpusPerReplica": 2},
    "inference": {"gpusPerReplica": 1},
    "orchestrator": {"batchSize": 32},
    "checkpoint": {"interval": 5},
}
"""Fields of the example that a run of stubs replaces. It requests GPUs, which the nodes only pretend to have."""
STUB_STEPS = 20
GPUS_PER_NODE = 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m tests.cluster.demo", description=__doc__.splitlines()[0])
    made.add_argument("--name", default="demo", help="name of the local cluster")
    made.add_argument("--provider", choices=PROVIDERS, help="default: $RLRUN_PROVIDER, else the first that works")
    made.add_argument("--stubs", action="store_true", help="run stubs of trainer and engines, on fake GPUs")
    made.add_argument("--down", action="store_true", help="take the cluster down at the end")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0 when the run is Complete and has learned."""
    options = parser().parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return report_errors(lambda: run_demo(options), interrupted=RESUME)


def run_demo(options: argparse.Namespace) -> int:
    """Prepare everything, start the cluster, and follow the run; return the exit code.

    Raises:
        ClusterError: something cannot be had, or the cluster does not start.
    """
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f}s] {text}")

    say("programs of Kubernetes, and images of this checkout (the first time: many minutes)")
    progress = Progress(say, screen=terminal())
    images = STUB_IMAGES if options.stubs else REAL_IMAGES
    built = prepare(progress, images=images, kwok=False, provider=options.provider)
    say(f"local cluster of {NODES} nodes")
    archives = [image.archive for image in built.values()]
    cluster = api.up(
        options.name, nodes=NODES, kwok=False, images=archives, provider=options.provider, progress=progress
    )
    try:
        code = _follow_run(cluster, built, say, stubs=options.stubs)
    finally:
        if options.down:
            api.down(options.name)
    if not options.down:
        _look_around(cluster)
    return code


def _follow_run(cluster: api.Cluster, built: dict[str, BuiltImage], say: Say, *, stubs: bool) -> int:
    """Run the example to its end; return the exit code, after an explanation if it is not 0."""
    try:
        code = _judge(_run(cluster, built, say, stubs=stubs), learns=not stubs)
    except (ClusterError, TimeoutError) as error:
        print(f"error: {error}")
        code = 1
    if code:
        print(explain(cluster))
    return code


def _run(cluster: api.Cluster, built: dict[str, BuiltImage], say: Say, *, stubs: bool) -> Outcome:
    """Install the product, apply the example, and follow it to its end."""
    references = {name: image.reference for name, image in built.items()}
    if stubs:
        references |= dict.fromkeys(("trainer", "inference"), references["stub"])
    say(f"helm install on {cluster.provider}")
    install(cluster, references)
    cluster.kubectl("delete", "rlrun", RUN, "--ignore-not-found", "--wait", timeout=120)
    cluster.kubectl("delete", "pvc", f"{RUN}-data", "--ignore-not-found", "--wait", timeout=120)
    if stubs:
        for node in cluster.nodes:
            cluster.fake_gpus(node, GPUS_PER_NODE)
        say(f"kubectl apply of {EXAMPLE.relative_to(ROOT)} with stubs")
        example = json.loads(cluster.kubectl("create", "--dry-run=client", "-o", "json", "-f", str(EXAMPLE)))
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(stub_run(example)))
    else:
        say(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}")
        cluster.kubectl("apply", "-f", str(EXAMPLE))
    outcome = follow(cluster, RUN, timeout=RUN_SECONDS)
    say(f"{outcome.phase} {outcome.seconds:.0f} s after apply: {outcome.status.get('message', '')}")
    return outcome


def stub_run(example: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest as a short run of stubs, which has no evaluation and requests GPUs."""
    spec = {key: value for key, value in example["spec"].items() if key != "evaluation"}
    spec |= {block: {**spec.get(block, {}), **fields} for block, fields in STUB_SPEC.items()}
    return {**example, "spec": {**spec, "maxSteps": STUB_STEPS}}


def explain(cluster: api.Cluster) -> str:
    """Return everything that helps to find why the run did not complete."""
    mine = f"rlrun.io/run={RUN}"
    questions = (
        ("describe", "rlr", RUN),
        ("get", "nodes,pods,pvc", "--all-namespaces", "-o", "wide"),
        ("describe", "pods", "-l", mine),
        ("logs", "-l", mine, "--all-containers", "--prefix", "--tail=100"),
        ("logs", "-n", SYSTEM, f"deployment/{RELEASE}", "--tail=200"),
        ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
    )
    return "\n".join(f"--- kubectl {' '.join(words)}\n{_answer(cluster, words)}" for words in questions)


def _answer(cluster: api.Cluster, words: Sequence[str]) -> str:
    try:
        return cluster.kubectl(*words)
    except ClusterError as error:
        return str(error)


def _judge(outcome: Outcome, *, learns: bool) -> int:
    if outcome.phase != "Complete":
        return 1
    if not learns:
        return 0
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
