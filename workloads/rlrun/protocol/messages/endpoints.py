"""Paths, ports, keys and protocol version of the roles' HTTP interfaces, in pods and on one machine.

The roles, their test doubles and the renderer of probes, Services and network policies use these constants. Routes without a key are for
probes and the metrics scraper; all others require the run's key as `Authorization: Bearer`. `trainer_channel` has more routes of the
trainer.

A guest (`trainer.sharedWith`) has its own key, like any run. When it joins, the trainer confirms the digest of that key with a proof that
requires the host's key. Trainer and engines can then identify a guest by its requests, without a list. Proof and digest are not secret:
they are useless without the guest's key, and reveal nothing about the host's key.

The protocol version between orchestrator and engine covers the engine's routes under `/rlrun`, and the weight folders that it loads. Both
sides check it before weights are transferred: the orchestrator in the engine's status, the engine in a header of each request. Images of
two incompatible releases then report an error instead of sampling from misread weights.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

from rlrun import __version__

# ---- the engine, InferenceConfig.port

ENGINE_PORT = 8000
ENGINE_HEALTH = "/health"
"""Without a key. 200 while the engine's process serves: startup and liveness."""
ENGINE_READY = "/rlrun/ready"
"""Without a key. 200 once the engine answers and has a policy version from the run's orchestrator, 503 with the reason before."""
ENGINE_METRICS = "/metrics"
"""Without a key. Prometheus text, with vLLM's names."""
ENGINE_STATUS = "/rlrun/status"
ENGINE_UPDATE_WEIGHTS = "/rlrun/update_weights"
ENGINE_RELOAD_WEIGHTS = "/rlrun/reload_weights"
ENGINE_RECEIVE_WEIGHTS = "/rlrun/receive_weights"
ENGINE_SLEEP = "/rlrun/sleep"
"""Route of an engine that shares its GPUs with the trainer: it releases their memory until the next transfer of weights."""
ENGINE_GENERATE = "/inference/v1/generate"
"""Route of vLLM: tokens as JSON, one dictionary each."""
ENGINE_GENERATE_PACKED = "/rlrun/generate"
"""The same with token columns in their memory layout, see `packed_columns`."""
ENGINE_PARSE = "/v1/chat/completions/derender"
"""Route of vLLM: converts sampled tokens to a chat message, with the parsers of the engine's start."""

# ---- the trainer

TRAINER_PORT = 29600
"""Rank 0's channel to the orchestrator, TrainerConfig.port."""
TRAINER_READY = "/rlrun/trainer/ready"
"""Without a key, on the channel. 200 once the attempt has started and batches are accepted, 503 before."""
RENDEZVOUS_PORT = 29500
"""torchrun's store on the trainer's first pod."""
POD_PORT = 29601
"""Server of every trainer pod: its probe, its metrics, and the rendezvous of the pods before torchrun starts. An engine's pod uses it for
its metrics."""
POD_READY = "/rlrun/pod/ready"
"""Without a key. 200 while the trainer of this pod runs (in the first pod: and its attempt has started), else 503 with the reason."""
POD_METRICS = "/metrics"
"""Without a key. Prometheus text about the pod's GPUs, from trainer and engine pods."""
POD_JOIN = "/rlrun/pod/join"
"""Route with which the other pods report to the first pod."""

# ---- the orchestrator, OrchestratorConfig.metrics_port

ORCHESTRATOR_PORT = 9100
ORCHESTRATOR_HEALTH = "/health"
"""Without a key. 200 while the orchestrator's event loop runs."""
ORCHESTRATOR_READY = "/ready"
"""Without a key. 503 with the reason if the progress Lease is not renewed and no step makes progress, else 200."""
ORCHESTRATOR_METRICS = "/metrics"
"""Without a key. Prometheus text."""
ORCHESTRATOR_PROGRESS = "/rlrun/progress"


_SCHEME, _GUEST = b"bearer", b"guest"


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def guest_proof(api_key: str, guest: str, digest: str) -> str:
    """Return the proof that a key belongs to a guest.

    Args:
        api_key: key of the run with the trainer.
        guest: name of the guest.
        digest: digest of the guest's own key (`key_digest`).
    """
    return hmac.new(api_key.encode(), f"rlrun guest {guest} {digest}".encode(), hashlib.sha256).hexdigest()


def guest_key(guest: str, key: str, proof: str) -> str:
    """Return the key that a guest sends to its host's trainer and engines: name, own key and proof in one."""
    return f"{_GUEST.decode()}.{guest}.{key}.{proof}"


def calling_guest(authorization: Sequence[str | bytes], api_key: str) -> str | None:
    """Return the name of the guest whose key a request contains; an empty name for the run's own key; None for neither.

    Args:
        authorization: values as in `holds_key`.
        api_key: key of the run that received the request.
    """
    if holds_key(authorization, api_key):
        return ""
    if len(authorization) != 1:
        return None
    scheme, given = _given_key(authorization[0])
    kind, _, rest = given.partition(b".")
    parts = rest.rsplit(b".", 2)
    if scheme.lower() != _SCHEME or kind != _GUEST or len(parts) != 3:
        return None
    try:
        guest, key = parts[0].decode(), parts[1].decode()
    except UnicodeDecodeError:
        return None
    right = guest_proof(api_key, guest, key_digest(key)).encode()
    genuine = hmac.compare_digest(hashlib.sha256(parts[2]).digest(), hashlib.sha256(right).digest())
    return guest if genuine and guest else None


def holds_key(authorization: Sequence[str | bytes], api_key: str) -> bool:
    """Return whether a request contains the run's key.

    Args:
        authorization: all values of its `Authorization` header, as text or as received bytes; any text is accepted, even if no encoding
            can represent it.
        api_key: key of the run.
    """
    if len(authorization) != 1:
        return False
    scheme, given = _given_key(authorization[0])
    # Digests have equal lengths, so the comparison does not reveal the length of the key.
    digests = (hashlib.sha256(part).digest() for part in (given, api_key.encode()))
    return scheme.lower() == _SCHEME and hmac.compare_digest(*digests)


def _given_key(value: str | bytes) -> tuple[bytes, bytes]:
    scheme, _, given = (value if isinstance(value, bytes) else value.encode(errors="surrogatepass")).partition(b" ")
    return scheme, given.strip()


PROTOCOL = 1
"""Protocol version, increased by every change after which one side would misunderstand the other."""
HEADER = "rlrun-protocol"
"""Header of the orchestrator's requests: `Speaker.header`."""
REFUSED = 412
"""HTTP status for a request about weights from a side with another version."""


class Speaker(NamedTuple):
    """Protocol version and release of one side."""

    protocol: int
    release: str

    @property
    def header(self) -> str:
        """Value of `HEADER`."""
        return f"{self.protocol} {self.release}"


OWN = Speaker(PROTOCOL, __version__)
"""Version of this side."""
BEFORE = Speaker(1, "0.1.0 or earlier")
"""Version of a side that does not report one: releases before the introduction of versions use the first one."""


def of_header(text: str | None) -> Speaker:
    """Return the version of the side that sent a request."""
    protocol, _, release = (text or "").partition(" ")
    return Speaker(int(protocol), release or "unknown") if protocol.isascii() and protocol.isdecimal() else BEFORE


def of_status(protocol: object, release: object) -> Speaker:
    """Return the version of an engine, from `protocol` and `release` in its status."""
    return Speaker(protocol, str(release)) if isinstance(protocol, int) else BEFORE


def explain_mismatch(engine: Speaker, orchestrator: Speaker) -> str | None:
    """Return why the two cannot work together, or None if they can."""
    if engine.protocol == orchestrator.protocol:
        return None
    return (
        f"the engine's image is of release {engine.release} (protocol {engine.protocol}), the orchestrator's of release "
        f"{orchestrator.release} (protocol {orchestrator.protocol}): use images of one release in spec.inference.image, "
        "spec.orchestrator.image and spec.trainer.image, or remove these fields to use the operator's own images"
    )
