"""Load of an inference server, read from its Prometheus metrics. Pure; knows nothing of vLLM but the names."""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.inference.client.completions import EngineError

_LOAD = frozenset(
    f"vllm:{name}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Load of one server, summed over its engines."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction of the KV cache in use, of the fullest engine."""
    preemptions: int | None = None
    """Sequences put off since the server's start because the KV cache was full; None: it does not say."""


def parse_metrics(text: str) -> EngineMetrics:
    """Load from vLLM's Prometheus text; a missing metric is an `EngineError`, not an idle engine. Preemptions may be missing."""
    values: dict[str, list[float]] = {}
    try:
        for line in text.splitlines():
            if line.startswith("vllm:"):
                name = line.partition("{")[0].partition(" ")[0]
                if name in _LOAD:
                    values.setdefault(name, []).append(float(line.rpartition(" ")[2]))
        preemptions = values.get("vllm:num_preemptions_total")
        return EngineMetrics(
            running=int(sum(values["vllm:num_requests_running"])),
            waiting=int(sum(values["vllm:num_requests_waiting"])),
            kv_usage=max(values["vllm:kv_cache_usage_perc"]),
            preemptions=None if preemptions is None else int(sum(preemptions)),
        )
    except KeyError as error:
        raise EngineError(f"/metrics lacks {error}") from None
    except (ValueError, OverflowError) as error:
        raise EngineError(f"/metrics has a value that is no number: {error}") from None
