"""Load of an inference server, parsed from vLLM's Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.inference.client.completions import EngineError

_LOAD = frozenset(
    f"vllm:{name}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Load of one server, summed over its data-parallel engines."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction (0 to 1) of the KV cache in use, of the engine with the highest use."""
    preemptions: int | None = None
    """Preempted sequences since the server's start (KV cache full); None if the server does not report it."""


def parse_metrics(text: str) -> EngineMetrics:
    """Parse vLLM's Prometheus text. A missing load metric raises `EngineError` instead of reporting an idle engine."""
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
        raise EngineError(f"/metrics has a value that is not a number: {error}") from None
