"""Paths and ports on which the roles of a run answer, in pods and on one machine.

The roles, stand-ins of them and the renderer of probes, Services and network policies take them from here. Keyless routes are for probes
and the metrics scraper; all others demand the run's key as `Authorization: Bearer`. The trainer's channel has more routes: see `channel`.
"""

from __future__ import annotations

# ---- the engine, InferenceConfig.port

ENGINE_PORT = 8000
ENGINE_HEALTH = "/health"
"""Keyless. 200 while the engine's process serves: startup and liveness."""
ENGINE_READY = "/rlrun/ready"
"""Keyless. 200 once the engine answers and holds a policy version that the run's orchestrator handed over, 503 with the reason before."""
ENGINE_METRICS = "/metrics"
"""Keyless. Prometheus text, with vLLM's names."""
ENGINE_STATUS = "/rlrun/status"
ENGINE_UPDATE_WEIGHTS = "/rlrun/update_weights"
ENGINE_RELOAD_WEIGHTS = "/rlrun/reload_weights"
ENGINE_RECEIVE_WEIGHTS = "/rlrun/receive_weights"
ENGINE_SLEEP = "/rlrun/sleep"
"""Route of an engine that shares its GPUs with the trainer: it gives their memory up until the next hand-over of weights."""
ENGINE_GENERATE = "/inference/v1/generate"
"""vLLM's own: tokens as JSON, a dictionary for each."""
ENGINE_GENERATE_PACKED = "/rlrun/generate"
"""The same with token columns as they are in memory, see `packed`."""
ENGINE_PARSE = "/v1/chat/completions/derender"
"""vLLM's own: sampled tokens become a chat message, by the parsers that the engine was started with."""

# ---- the trainer

TRAINER_PORT = 29600
"""Rank 0's channel to the orchestrator, TrainerConfig.port."""
TRAINER_READY = "/rlrun/trainer/ready"
"""Keyless, on the channel. 200 once the attempt has begun and batches are taken, 503 before."""
RENDEZVOUS_PORT = 29500
"""torchrun's store on the trainer's first pod."""
POD_PORT = 29601
"""Every trainer pod's own small server: its probe, its metrics, and the meeting of the pods before torchrun starts. An engine's pod has one
for its metrics."""
POD_READY = "/rlrun/pod/ready"
"""Keyless. 200 while the trainer of this pod runs (in the first pod: and its attempt has begun), else 503 with the reason."""
POD_METRICS = "/metrics"
"""Keyless. Prometheus text: the pod's GPUs. Served by trainers' and engines' pods."""
POD_JOIN = "/rlrun/pod/join"
"""Route by which the other pods report to the first one."""

# ---- the orchestrator, OrchestratorConfig.metrics_port

ORCHESTRATOR_PORT = 9100
ORCHESTRATOR_HEALTH = "/health"
"""Keyless. 200 while the orchestrator's event loop turns."""
ORCHESTRATOR_READY = "/ready"
"""Keyless. 503 with the reason while neither the progress Lease is renewed nor a step gets on, else 200."""
ORCHESTRATOR_METRICS = "/metrics"
"""Keyless. Prometheus text."""
ORCHESTRATOR_PROGRESS = "/rlrun/progress"
