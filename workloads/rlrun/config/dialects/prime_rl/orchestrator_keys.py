"""PRIME-RL's keys of the orchestrator and of evaluations.

`ORCHESTRATOR_ROWS` has the keys of `[orchestrator]`: environments, sampling, evaluation, buffers and the objective's groups.
`EVALUATION_ROWS` has the keys of a file for `eval`: environments and settings of the evaluation.
"""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    all_or,
    all_tokens,
    defer_value,
    environment_id,
    environment_ids,
    if_set,
    map_choice,
    of_chat,
    only_values,
    option_if,
    own_server,
    policy_steps,
    put_below,
    read_algorithms,
    read_filters,
    read_gates,
    read_harness,
    read_objective,
    read_place,
    read_taskset,
    read_workers,
    seconds_left,
)
from rlrun.config.dialects.prime_rl.run_keys import of_loss, of_role, of_tokenizer
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_AGENT = "the orchestrator's chat loop is the agent"
_SERVER = "a run starts its own engines and connects them"
_ADVANTAGE = "algorithm.advantage"
_ALGORITHMS = {
    "grpo": {"algorithm.advantage.name": "grpo"},
    "default": {"algorithm.advantage.name": "grpo"},
    "max_rl": {"algorithm.advantage.name": "max_rl"},
    "rl": {"algorithm.advantage.name": "reward"},
    "opd": {"algorithm.preset": "distill"},
}
_OF_ONE = {
    "grpo": {"algorithm.advantage.name": "grpo"},
    "max_rl": {"algorithm.advantage.name": "max_rl"},
    "rl": {"algorithm.advantage.name": "reward"},
    "opd": {"algorithm.loss.name": "distill"},
}
_KNOWN = "grpo, max_rl, rl, opd"
_NO_OTHER = "it belongs to an algorithm that is not supported here"


_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
)  # fmt: skip
"""Sampling parameters with the same name here. The field refuses parameters that are not supported in training."""


def of_sampling(table: str, ours: str) -> tuple[Row, ...]:
    """Build the rows of a table `sampling`, for training or evaluation."""
    body, arguments = f"{table}.extra_body", f"{ours}.chat_template_arguments"
    return (
        *(mapped_key(f"{place}.{name}", f"{ours}.{name}", by=all_tokens if name == "top_k" else if_set)
          for place in (table, body) for name in _PARAMETERS),
        mapped_key(f"{table}.max_tokens", f"{ours}.max_tokens", by=if_set),
        mapped_key(f"{table}.max_completion_tokens", f"{ours}.max_tokens", by=if_set),
        refused_key(f"{table}.temp_scheduler", f"not supported: {ours}.temperature is constant", f"{ours}.temperature"),
        refused_key(f"{table}.reasoning_effort", f"write it into {arguments}, with the name that the model's template uses", arguments),
        mapped_key(f"{body}.chat_template_kwargs", arguments),
        ignored_key(body, "an empty table has no effect"),
        ignored_key(f"{table}.auto_program_id", "requests go directly to the engines"),
    )  # fmt: skip


def _of_environment_algorithm(table: str, ours: str) -> tuple[Row, ...]:
    """Build the rows of the objective of one environment."""
    return (
        mapped_key(
            f"{table}.algo.type", f"{ours}.algorithm.advantage.name", f"{ours}.algorithm.loss.name",
            by=read_objective(_OF_ONE, _KNOWN, ours), text="opd: loss distill",
        ),
        mapped_key(
            f"{table}.algorithms", f"{ours}.algorithm.advantage.name", f"{ours}.algorithm.loss.name",
            by=read_algorithms(_OF_ONE, _KNOWN, ours), text="a list with one entry; opd: loss distill",
        ),
        mapped_key(f"{table}.algo.teacher.name", "algorithm.reference.model"),
        ignored_key(f"{table}.algo.teacher.*", "the teacher runs in the trainer with the policy, without a server"),
        ignored_key(f"{table}.algo.*", _NO_OTHER, only_values((), "", "not supported here; see environments[].algorithm")),
    )  # fmt: skip


def of_environment(table: str, ours: str = "environments[]") -> tuple[Row, ...]:
    """Build the rows of an environment; `table` ends with `[]`."""
    ids = (f"{ours}.id", f"{ours}.args")
    return (
        mapped_key(f"{table}.id", f"{ours}.id", by=environment_id, text="verifiers:<name>, without owner and version"),
        mapped_key(f"{table}.taskset", *ids, by=read_taskset, text="id: verifiers:<name>; other keys: taskset in args"),
        mapped_key(f"{table}.env.taskset", *ids, by=read_taskset, text="id: verifiers:<name>; other keys: taskset in args"),
        mapped_key(f"{table}.env_id", f"{ours}.id", by=environment_id, text="verifiers:<name>, without owner and version"),
        mapped_key(f"{table}.env_args", f"{ours}.args"),
        ignored_key(f"{table}.env.*.harness", _AGENT, read_harness),
        ignored_key(
            f"{table}.env.*.runtime",
            _AGENT, only_values(({"type": "subprocess"},), _AGENT,
                "not supported: episodes run with the orchestrator, not in a sandbox"),
        ),
        mapped_key(f"{table}.env.*.max_turns", f"{ours}.args", by=put_below("max_turns")),
        ignored_key(f"{table}.env.*.max_output_tokens", "seq_len limits the length of all turns together"),
        mapped_key(f"{table}.env.*.timeout.rollout", f"{ours}.timeout_seconds", by=seconds_left),
        mapped_key(f"{table}.env.*.timeout", f"{ours}.timeout_seconds", by=seconds_left),
        ignored_key(f"{table}.select.shuffle", "tasks are shuffled in each epoch"),
        ignored_key(f"{table}.select.seed", "seed is the seed of all random number generators of the run"),
        mapped_key(f"{table}.select.limit", f"{ours}.args", by=put_below("limit")),
        ignored_key(f"{table}.serve", "environments run with the orchestrator"),
        ignored_key(f"{table}.pool", "environments[].workers is the number of processes"),
        ignored_key(f"{table}.retries", "a failed rollout is rejected and counted, and another rollout starts"),
        mapped_key(f"{table}.env.id", f"{ours}.args", by=put_below("env.id")),
        ignored_key(f"{table}.harness", _AGENT, read_harness),
        mapped_key(f"{table}.name", f"{ours}.name", by=if_set),
        mapped_key(f"{table}.args", f"{ours}.args"),
        mapped_key(f"{table}.curriculum.gates", "algorithm.filters.zero_variance", by=read_gates, text="advantage_range without bounds"),
        ignored_key(
            f"{table}.curriculum.sampler", "all tasks are drawn with equal probability",
            only_values(({"type": "standard"},), "all tasks are drawn with equal probability",
                 "pools by reward have another form here; see environments[].curriculum.easy and .hard"),
        ),
        mapped_key(f"{table}.ratio", f"{ours}.ratio", by=if_set),
        mapped_key(f"{table}.group_size", f"{ours}.group_size"),
        mapped_key(f"{table}.rollouts_per_example", f"{ours}.group_size"),
        mapped_key(f"{table}.num_workers", f"{ours}.workers", by=read_workers),
        mapped_key(f"{table}.timeout", f"{ours}.timeout_seconds", by=seconds_left),
        mapped_key(f"{table}.timeout.rollout", f"{ours}.timeout_seconds", by=seconds_left),
        mapped_key(f"{table}.timeout_seconds", f"{ours}.timeout_seconds", by=seconds_left),
        ignored_key(f"{table}.max_retries", "a failed rollout is rejected and counted, and another rollout starts"),
        ignored_key(f"{table}.extra_env_kwargs", "the run sets seq_len and scoring"),
        ignored_key(f"{table}.install", "install environments with pip before the run"),
        refused_key(
            f"{table}.address",
            "not supported: environments run with the orchestrator; environments[].image starts a container for one environment",
            f"{ours}.image",
        ),
        ignored_key(
            f"{table}.max_total_completion_tokens", "-1 means unlimited",
            only_values((-1,), "-1 means unlimited", "not supported: seq_len limits the length of all turns together"),
        ),
        *_of_environment_algorithm(table, ours),
        *of_sampling(f"{table}.sampling", f"{ours}.sampling"),
    )  # fmt: skip


def _of_played(table: str) -> tuple[Row, ...]:
    """Build the rows for all training environments together; `table` ends with a dot."""
    return (
        *of_environment(f"{table}env[]"),
        *of_environment(f"{table}source[]"),
        *of_sampling(f"{table}sampling", "sampling"),
        mapped_key(f"{table}rollouts_per_example", "environments[].group_size", by=defer_value("group_size"),
            text="for environments that do not set it"),
        mapped_key(f"{table}group_size", "environments[].group_size", by=defer_value("group_size"),
            text="for environments that do not set it"),
        mapped_key(f"{table}num_workers", "environments[].workers", by=defer_value("workers"), text="for environments that do not set it"),
        mapped_key(f"{table}workers_per_env", "environments[].workers", by=defer_value("workers"),
            text="for environments that do not set it"),
        ignored_key(f"{table}max_retries", "a failed rollout is rejected and counted, and another rollout starts"),
    )  # fmt: skip


def _of_evaluation(table: str) -> tuple[Row, ...]:
    ours = "evaluation"
    env = "an evaluated environment"
    return (
        mapped_key(table, ours, by=defer_value("evaluates")),
        mapped_key(f"{table}.interval", f"{ours}.interval"),
        mapped_key(f"{table}.num_examples", f"{ours}.num_tasks", by=all_or),
        mapped_key(f"{table}.num_tasks", f"{ours}.num_tasks", by=all_or),
        mapped_key(f"{table}.select.limit", f"{ours}.num_tasks", by=all_or),
        ignored_key(f"{table}.select.*", "tasks come from the environment's eval split, in order"),
        ignored_key(f"{table}.skip_first_step", "the first version, the base model, is always evaluated"),
        ignored_key(f"{table}.retrigger_on_resume", "a version is never evaluated twice"),
        mapped_key(f"{table}.rollouts_per_example", f"{ours}.samples_per_task"),
        mapped_key(f"{table}.group_size", f"{ours}.samples_per_task"),
        *of_sampling(f"{table}.sampling", f"{ours}.sampling"),
        mapped_key(f"{table}.env", ours, by=defer_value("evaluated"), text=f"{env} is evaluated if the run trains on it too"),
        mapped_key(f"{table}.source", ours, by=defer_value("evaluated"), text=f"{env} is evaluated if the run trains on it too"),
        ignored_key(f"{table}.eval_base_model", "the first version, the base model, is always evaluated"),
        ignored_key(f"{table}.skip_eval_on_resume", "a version is never evaluated twice"),
        ignored_key(f"{table}.skip_eval_on_restart", "a version is never evaluated twice"),
        ignored_key(f"{table}.cancel_inflight_rollouts_on_eval", "training continues during an evaluation"),
        ignored_key(f"{table}.num_workers", "the environment's own workers run the evaluation"),
        ignored_key(f"{table}.max_retries", "a failed episode is counted as failed"),
    )  # fmt: skip


_BUFFER = (
    mapped_key("orchestrator.buffer.easy_threshold", "environments[].curriculum.easy.threshold", by=defer_value("easy"),
        text="for every environment"),
    mapped_key("orchestrator.buffer.hard_threshold", "environments[].curriculum.hard.threshold", by=defer_value("hard"),
        text="for every environment"),
    *(
        ignored_key(
            f"orchestrator.buffer.{name}_fraction", "0 returns no tasks to the pool",
            only_values(
                (0, 0.0), "0 returns no tasks to the pool",
                f"here environments[].curriculum.{name}.fraction is a share of draws, not of returned tasks",
            ),
        )
        for name in ("easy", "hard")
    ),
    mapped_key(
        "orchestrator.buffer.online_difficulty_filtering", "algorithm.filters.zero_variance",
        by=option_if({"algorithm.filters.zero_variance": True}),
    ),
    mapped_key("orchestrator.buffer.env_ratios", "environments[].ratio", by=defer_value("ratios"),
        text="one number per environment, in order"),
    ignored_key("orchestrator.buffer.seed", "seed is the seed of all random number generators of the run"),
    ignored_key("orchestrator.buffer.hash_keys", "a task is identified by its full content"),
    ignored_key(
        "orchestrator.buffer.skip_verification", "only false is supported",
        only_values((False,), "only false is supported", "not supported: preset distill learns without rewards"),
    ),
)  # fmt: skip
_OF_ADVANTAGE = (
    mapped_key("orchestrator.advantage.type", f"{_ADVANTAGE}.name", by=map_choice({"default": "grpo"},
        "not supported here; known: default")),
    mapped_key(
        "orchestrator.advantage.length_weighted_mean", f"{_ADVANTAGE}.name", by=option_if({f"{_ADVANTAGE}.name": "opo"}), text="true: opo"
    ),
    mapped_key(
        "orchestrator.advantage.normalize_by_pass_rate", f"{_ADVANTAGE}.name",
        by=option_if({f"{_ADVANTAGE}.name": "max_rl"}), text="true: max_rl",
    ),
    mapped_key(
        "orchestrator.advantage.std_norm", f"{_ADVANTAGE}.name", f"{_ADVANTAGE}.options",
        by=option_if({f"{_ADVANTAGE}.name": "grpo", f"{_ADVANTAGE}.options.std": "group"}), text="true: option std: group",
    ),
    mapped_key(
        "orchestrator.advantage.neg_clipped", f"{_ADVANTAGE}.name", f"{_ADVANTAGE}.options",
        by=option_if({f"{_ADVANTAGE}.name": "grpo", f"{_ADVANTAGE}.options.neg_clipped": True}), text="true: option neg_clipped",
    ),
    mapped_key(
        "orchestrator.advantage.leave_one_out", f"{_ADVANTAGE}.name", by=option_if({f"{_ADVANTAGE}.name": "rloo"}), text="true: rloo"
    ),
    refused_key(
        "orchestrator.advantage.length_bonus",
        "not supported: option length_penalty of algorithm.advantage reduces the reward by length", f"{_ADVANTAGE}.options",
    ),
    refused_key(
        "orchestrator.advantage.length_penalty",
        "not supported in this form: option length_penalty of algorithm.advantage is a number", f"{_ADVANTAGE}.options",
    ),
    refused_key(
        "orchestrator.advantage.import_path",
        "not supported with this signature: algorithm.advantage.name takes package.module:function", f"{_ADVANTAGE}.name",
    ),
    ignored_key("orchestrator.advantage.kwargs", "they belong to import_path"),
)  # fmt: skip


def _of_algorithm(table: str) -> tuple[Row, ...]:
    known = _KNOWN
    return (
        mapped_key(
            f"{table}.type",
            f"{_ADVANTAGE}.name",
            "algorithm.preset",
            by=read_objective(_ALGORITHMS, known),
            text="opd: preset distill",
        ),
        mapped_key(f"{table}.teacher.name", "algorithm.reference.model"),
        ignored_key(f"{table}.teacher.*", "the teacher runs in the trainer with the policy, without a server"),
        ignored_key(
            f"{table}.*",
            _NO_OTHER,
            only_values((), "", "not supported here; see algorithm.advantage and algorithm.loss"),
        ),
        *of_loss(f"{table}.loss"),
    )


ORCHESTRATOR_ROWS: tuple[Row, ...] = (
    *of_role("orchestrator."),
    *of_tokenizer("orchestrator."),
    mapped_key("orchestrator.model.name", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    same_key("orchestrator.model.trust_remote_code", "model.trust_remote_code"),
    ignored_key("orchestrator.model.lora.name", "the adapter has the run's name"),
    ignored_key("orchestrator.lora_name", "the adapter has the run's name"),
    mapped_key("orchestrator.model.lora.rank", "trainer.lora.rank", by=if_set),
    mapped_key("orchestrator.model.lora.alpha", "trainer.lora.alpha", by=if_set),
    mapped_key("orchestrator.optim.lr", "trainer.optimizer.lr"),
    mapped_key("orchestrator.output_dir", "output_dir", by=defer_value("orchestrator_output_dir"), text="if nothing else sets it"),
    same_key("orchestrator.batch_size"),
    same_key("orchestrator.oversampling_factor"),
    same_key("orchestrator.trajectory_strategy"),
    mapped_key("orchestrator.seed", "seed", by=if_set),
    *_of_played("orchestrator."),
    *_of_played("orchestrator.train."),
    *_of_algorithm("orchestrator.algo"),
    *_of_algorithm("orchestrator.train.algo"),
    *_of_evaluation("orchestrator.eval"),
    mapped_key("orchestrator.val", "evaluation", by=defer_value("validates")),
    mapped_key("orchestrator.val.interval", "evaluation.interval", by=defer_value("validation_interval"), text="if there is no eval"),
    mapped_key("orchestrator.val.num_examples", "evaluation.num_tasks", by=defer_value("validation_tasks"), text="if there is no eval"),
    mapped_key(
        "orchestrator.val.rollouts_per_example", "evaluation.samples_per_task",
        by=defer_value("validation_samples"), text="if there is no eval",
    ),
    *_BUFFER,
    *_OF_ADVANTAGE,
    mapped_key("orchestrator.filters", "algorithm.filters", by=read_filters),
    mapped_key("orchestrator.pre_batch_filters", "algorithm.filters", by=read_filters),
    mapped_key("orchestrator.post_batch_filters", "algorithm.filters", by=read_filters),
    mapped_key(
        "orchestrator.mask_truncated_completions", "algorithm.filters.overlong_mask",
        by=option_if({"algorithm.filters.overlong_mask": True}),
    ),
    mapped_key("orchestrator.max_async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("orchestrator.async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("orchestrator.max_off_policy_steps", "algorithm.max_off_policy_steps"),
    ignored_key(
        "orchestrator.strict_async_level", "only false is supported",
        only_values((False,), "only false is supported", "not supported: max_off_policy_steps limits the staleness of training data"),
    ),
    mapped_key("orchestrator.max_concurrent", "orchestrator.max_concurrency", by=if_set),
    mapped_key("orchestrator.max_inflight_rollouts", "orchestrator.max_concurrency", by=if_set),
    mapped_key("orchestrator.max_inflight_episodes", "orchestrator.max_concurrency", by=if_set),
    mapped_key("orchestrator.max_inflight_groups", "orchestrator.max_concurrency", by=defer_value("groups_in_flight"),
        text="times the group size"),
    mapped_key("orchestrator.concurrency.max_inflight", "orchestrator.max_concurrency", by=if_set),
    ignored_key("orchestrator.concurrency.*", "the load on the engines is controlled automatically"),
    ignored_key("orchestrator.tasks_per_minute", "environments[].workers and orchestrator.max_concurrency limit the load"),
    ignored_key("orchestrator.num_train_workers", "the trainer determines the number of ranks"),
    ignored_key("orchestrator.use_token_client", "tokens are exchanged with the engine unchanged"),
    ignored_key("orchestrator.client", _SERVER),
    ignored_key("orchestrator.client.*", _SERVER),
    ignored_key("orchestrator.client.base_url", _SERVER, own_server),
    refused_key("orchestrator.token_batch_size", "not supported: orchestrator.batch_size counts rollouts", "orchestrator.batch_size"),
    mapped_key("orchestrator.teacher_model.model.name", "algorithm.reference.model"),
    ignored_key("orchestrator.teacher_model.model.trust_remote_code", "the policy's setting applies"),
    ignored_key("orchestrator.teacher_model.client", "the teacher runs in the trainer with the policy, without a server"),
    refused_key(
        "orchestrator.teacher_rollout_model",
        "not supported: rollouts come from the policy itself; synthesize writes rollouts of a teacher for supervised fine-tuning",
    ),
    mapped_key(
        "orchestrator.algorithms", f"{_ADVANTAGE}.name", "algorithm.preset", by=read_algorithms(_ALGORITHMS, _KNOWN),
        text=f"a list with one of {_KNOWN}",
    ),
    ignored_key("orchestrator.reload_weights_on_start", "engines have the run's weights before the first rollout"),
    ignored_key("orchestrator.zero_truncated_completions", "false is the default here",
            only_values((False,), "false is the default here", "not supported: algorithm.filters.overlong_mask excludes them")),
    ignored_key("orchestrator.eval.save", "answers and results are kept in the run's folder"),
    ignored_key("orchestrator.eval.save_to_hf", "answers and results are kept in the run's folder"),
    ignored_key("orchestrator.pool_size", "the orchestrator tokenizes prompts"),
    ignored_key("orchestrator.collect_inference_metrics", "the engines' metrics are collected"),
    ignored_key("orchestrator.env_install_prerelease", "install environments with pip before the run"),
    ignored_key("orchestrator.model.client", _SERVER),
    ignored_key("orchestrator.model.client.*", _SERVER),
    ignored_key("orchestrator.model.client.base_url", _SERVER, own_server),
    refused_key("orchestrator.actor", "not supported: rollouts come from the policy itself"),
    refused_key("orchestrator.models", "not supported: algorithm.reference.model is the only other model", "algorithm.reference.model"),
    refused_key("orchestrator.env_server", "not supported: environments run with the orchestrator"),
)  # fmt: skip


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
