"""Keys of a file for `eval`: environments and settings of the evaluation."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    all_or,
    defer_value,
    environment_ids,
    if_set,
    of_chat,
    policy_steps,
    read_place,
)
from rlrun.config.dialects.prime_rl.orchestrator import of_environment, of_sampling
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key

_KEPT = "answers and results are kept in the run's folder"

EVALUATION_ROWS: tuple[Row, ...] = (
    mapped_key("model", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    ignored_key("client.connect_timeout", "client.timeout includes the time to connect"),
    ignored_key("client.wait_for_ready_timeout", "a server that does not answer is reported immediately"),
    ignored_key("client.admin_base_url", "the run does not change the weights of such servers"),
    ignored_key("client.dp_rank_count", "the server divides requests among its ranks"),
    ignored_key("client.type", "requests are OpenAI's chat completions", of_chat),
    ignored_key("client.server_type", "requests are OpenAI's chat completions", of_chat),
    ignored_key("reasoning_field", "messages contain the content that the server returns"),
    refused_key("client.elastic", "not supported: write each server into client.base_url", "client.base_url"),
    mapped_key("environment_ids", "environments", by=environment_ids, text="verifiers:<name>, without owner and version"),
    mapped_key("num_examples", "evaluation.num_tasks", by=all_or),
    mapped_key("select.limit", "evaluation.num_tasks", by=all_or),
    mapped_key("rollouts_per_example", "evaluation.samples_per_task", by=if_set),
    mapped_key("group_size", "evaluation.samples_per_task", by=if_set),
    *of_sampling("sampling", "evaluation.sampling"),
    *of_environment("env[]"),
    *of_environment("source[]"),
    ignored_key("env[].num_examples", "evaluation.num_tasks applies to all environments"),
    ignored_key("env[].interval", "an evaluation runs once"),
    ignored_key("source[].num_examples", "evaluation.num_tasks applies to all environments"),
    mapped_key("model.name", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    mapped_key("concurrency.max_inflight", "orchestrator.max_concurrency", by=if_set),
    ignored_key("concurrency.*", "the load on the engines is controlled automatically"),
    ignored_key("tasks_per_minute", "orchestrator.max_concurrency limits the load"),
    ignored_key("source[].select", "evaluation.num_tasks applies to all environments"),
    ignored_key("select.*", "tasks come from the environment's eval split, in order"),
    mapped_key("max_concurrent", "orchestrator.max_concurrency", by=if_set),
    mapped_key("weights_dir", "policies.from_run"),
    mapped_key("steps", "policies.steps", by=policy_steps),
    mapped_key("eval_base", "policies.base", by=defer_value("eval_base"), text="with weights_dir"),
    ignored_key("save", _KEPT),
    ignored_key("save_to_hf", _KEPT),
    ignored_key("run", _KEPT),
    refused_key("watcher", "not supported: evaluation in [orchestrator] of a run evaluates every version", "evaluation.interval"),
)  # fmt: skip
