"""Enforcement of NetworkPolicies on one node: watches pods, namespaces and policies, and writes the node's nftables
table.

Run inside the node's namespaces as `python -m tests.cluster.native.enforcer KUBECONFIG POD_RANGE DNS_ADDRESS`. Like
most network plugins it fails open: a new pod is unrestricted until the API has its address, some tenths of a second.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .apiclient import ApiClient, ApiError
from .policy_rules import peers, rules

COLLECTIONS = {
    "pods": "/api/v1/pods",
    "namespaces": "/api/v1/namespaces",
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
}
SETTLE_S = 0.02  # events come in bursts: one table for a whole burst
RETRY_S = 0.5
Object = dict[str, Any]


def dns_pod(address: str) -> Object:
    """Return CoreDNS, a process of the control plane here, as a pod that policies can select."""
    meta = {"name": "coredns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
    return {"metadata": meta, "spec": {}, "status": {"podIP": address, "phase": "Running"}}


class Mirror:
    """A copy of one collection, updated by a separate thread; sets `changed` after each event."""

    def __init__(self, client: ApiClient, path: str, changed: threading.Event) -> None:
        self._client, self._path, self._changed = client, path, changed
        self._items: dict[str, Object] = {}
        self._lock = threading.Lock()
        self.filled = False
        threading.Thread(target=self._run, daemon=True).start()

    def items(self) -> list[Object]:
        """All objects of the last update."""
        with self._lock:
            return list(self._items.values())

    def _run(self) -> None:
        while True:
            try:
                listed = self._client.get(self._path)
                with self._lock:
                    self._items = {item["metadata"]["uid"]: item for item in listed["items"]}
                self.filled = True
                self._changed.set()
                for event in self._client.watch(self._path, listed["metadata"]["resourceVersion"]):
                    if event["type"] == "ERROR":  # the version is too old: list again
                        break
                    self._take(event)
            except ApiError as error:
                print(error, flush=True)
                time.sleep(RETRY_S)

    def _take(self, event: Object) -> None:
        if event["type"] == "BOOKMARK":
            return
        uid = event["object"]["metadata"]["uid"]
        with self._lock:
            if event["type"] == "DELETED":
                self._items.pop(uid, None)
            else:
                self._items[uid] = event["object"]
        self._changed.set()


def main() -> None:
    """Run for ever."""
    kubeconfig, pod_range, dns_address = sys.argv[1:]
    client, changed, last = ApiClient(Path(kubeconfig)), threading.Event(), ""
    mirrors = {name: Mirror(client, path, changed) for name, path in COLLECTIONS.items()}
    while True:
        changed.wait()
        time.sleep(SETTLE_S)
        changed.clear()
        if not all(mirror.filled for mirror in mirrors.values()):
            continue
        known = peers(mirrors["pods"].items(), mirrors["namespaces"].items(), pod_range, [dns_pod(dns_address)])
        table = rules(known, mirrors["policies"].items())
        if table != last and _write(table):
            last = table


def _write(table: str) -> bool:
    result = subprocess.run(["nft", "-f", "/dev/stdin"], input=table, text=True, capture_output=True)
    if result.returncode != 0:
        print(f"nft refuses the table: {result.stderr}\n{table}", flush=True)
    return result.returncode == 0


if __name__ == "__main__":
    main()
