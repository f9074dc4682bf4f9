"""Keys of a file of `eval`: environments, and how they are asked."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    all_or,
    environment_ids,
    later,
    of_chat,
    optional,
    place,
    policy_steps,
)
from rlrun.config.dialects.prime_rl.orchestrator import of_environment, of_sampling
from rlrun.config.dialects.rows import Row, ignored, refused, to

_KEPT = "answers and results are kept in the run's folder"

ROWS: tuple[Row, ...] = (
    to("model", "model.name", "model.path", by=place, text="a name with a path's form is model.path"),
    ignored("client.connect_timeout", "client.timeout bounds a request with its connection"),
    ignored("client.wait_for_ready_timeout", "a server that does not answer is named at once"),
    ignored("client.admin_base_url", "the weights of such servers are their own"),
    ignored("client.dp_rank_count", "the server divides requests among its ranks"),
    ignored("client.type", "requests are OpenAI's chat completions", of_chat),
    ignored("client.server_type", "requests are OpenAI's chat completions", of_chat),
    ignored("reasoning_field", "messages hold what the server gives as content"),
    refused("client.elastic", "there is none: name each server in client.base_url", "client.base_url"),
    to("environment_ids", "environments", by=environment_ids, text="verifiers:<name>, without owner and version"),
    to("num_examples", "evaluation.num_tasks", by=all_or),
    to("select.limit", "evaluation.num_tasks", by=all_or),
    to("rollouts_per_example", "evaluation.samples_per_task", by=optional),
    to("group_size", "evaluation.samples_per_task", by=optional),
    *of_sampling("sampling", "evaluation.sampling"),
    *of_environment("env[]"),
    *of_environment("source[]"),
    ignored("env[].num_examples", "evaluation.num_tasks is that of all environments"),
    ignored("env[].interval", "an evaluation is made once"),
    ignored("source[].num_examples", "evaluation.num_tasks is that of all environments"),
    to("model.name", "model.name", "model.path", by=place, text="a name with a path's form is model.path"),
    to("concurrency.max_inflight", "orchestrator.max_concurrency", by=optional),
    ignored("concurrency.*", "the load on the engines is controlled by itself"),
    ignored("tasks_per_minute", "orchestrator.max_concurrency bounds the load"),
    ignored("source[].select", "evaluation.num_tasks is that of all environments"),
    ignored("select.*", "tasks are those of the environment's eval split, from the first on"),
    to("max_concurrent", "orchestrator.max_concurrency", by=optional),
    to("weights_dir", "policies.from_run"),
    to("steps", "policies.steps", by=policy_steps),
    to("eval_base", "policies.base", by=later("eval_base"), text="beside weights_dir"),
    ignored("save", _KEPT),
    ignored("save_to_hf", _KEPT),
    ignored("run", _KEPT),
    refused("watcher", "there is none: evaluation in [orchestrator] of a run measures every version", "evaluation.interval"),
)  # fmt: skip
