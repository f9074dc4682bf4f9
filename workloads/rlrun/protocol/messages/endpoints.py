"""Paths and ports of the roles of a run, in pods and on one machine.

The roles, their test doubles and the renderer of probes, Services and network policies use these constants. Routes without a key are for
probes and the metrics scraper; all others require the run's key as `Authorization: Bearer`. `channel` has more routes of the trainer.
"""

from __future__ import annotations

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
"""The same with token columns in their memory layout, see `packed`."""
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
