"""Keys of `[orchestrator]`: environments, sampling, evaluation, buffers and the objective's groups."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    algorithms,
    all_or,
    all_tokens,
    at,
    choice,
    environment_id,
    filters,
    gates,
    harness,
    later,
    objective,
    only,
    option_if,
    optional,
    own_server,
    place,
    seconds_left,
    taskset,
    workers,
)
from rlrun.config.dialects.prime_rl.run import of_loss, of_role, of_tokenizer
from rlrun.config.dialects.rows import Row, ignored, refused, same, to

_AGENT = "the agent is the chat loop of the orchestrator"
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
_NO_OTHER = "it belongs to an algorithm that is not here"


_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
)  # fmt: skip
"""Parameters of sampling that have the same name here. Those that are not for training are refused by their field, with the reason."""


def of_sampling(table: str, ours: str) -> tuple[Row, ...]:
    """Rows of a table `sampling`, of training or of evaluation."""
    body, arguments = f"{table}.extra_body", f"{ours}.chat_template_arguments"
    return (
        *(to(f"{place}.{name}", f"{ours}.{name}", by=all_tokens if name == "top_k" else optional)
          for place in (table, body) for name in _PARAMETERS),
        to(f"{table}.max_tokens", f"{ours}.max_tokens", by=optional),
        to(f"{table}.max_completion_tokens", f"{ours}.max_tokens", by=optional),
        refused(f"{table}.temp_scheduler", f"there is none: {ours}.temperature is one value", f"{ours}.temperature"),
        refused(f"{table}.reasoning_effort", f"write it into {arguments}, as the model's template calls it", arguments),
        to(f"{body}.chat_template_kwargs", arguments),
        ignored(body, "an empty table asks for nothing"),
        ignored(f"{table}.auto_program_id", "requests go to the engines themselves"),
    )  # fmt: skip


def of_environment(table: str, ours: str = "environments[]") -> tuple[Row, ...]:
    """Rows of an environment that is played; `table` ends with `[]`."""
    ids = (f"{ours}.id", f"{ours}.args")
    return (
        to(f"{table}.id", f"{ours}.id", by=environment_id, text="verifiers:<name>, without owner and version"),
        to(f"{table}.taskset", *ids, by=taskset, text="id: verifiers:<name>; the rest: taskset in args"),
        to(f"{table}.env.taskset", *ids, by=taskset, text="id: verifiers:<name>; the rest: taskset in args"),
        to(f"{table}.env_id", f"{ours}.id", by=environment_id, text="verifiers:<name>, without owner and version"),
        to(f"{table}.env_args", f"{ours}.args"),
        ignored(f"{table}.env.*.harness", _AGENT, harness),
        ignored(
            f"{table}.env.*.runtime",
            _AGENT, only(({"type": "subprocess"},), _AGENT, "there is none: episodes are played beside the orchestrator, in no sandbox"),
        ),
        to(f"{table}.env.*.max_turns", f"{ours}.args", by=at("max_turns")),
        ignored(f"{table}.env.*.max_output_tokens", "seq_len is the length of all turns together"),
        to(f"{table}.env.*.timeout.rollout", f"{ours}.timeout_seconds", by=seconds_left),
        to(f"{table}.env.*.timeout", f"{ours}.timeout_seconds", by=seconds_left),
        ignored(f"{table}.select.shuffle", "tasks are shuffled in each epoch"),
        ignored(f"{table}.select.seed", "seed is that of everything random in the run"),
        to(f"{table}.select.limit", f"{ours}.args", by=at("limit")),
        ignored(f"{table}.serve", "environments are played beside the orchestrator"),
        ignored(f"{table}.pool", "environments[].workers has the number of processes"),
        ignored(f"{table}.retries", "a rollout that fails is rejected and counted, and another one is started"),
        to(f"{table}.env.id", f"{ours}.args", by=at("env.id")),
        ignored(f"{table}.harness", _AGENT, harness),
        to(f"{table}.name", f"{ours}.name", by=optional),
        to(f"{table}.args", f"{ours}.args"),
        to(f"{table}.curriculum.gates", "algorithm.filters.zero_variance", by=gates, text="advantage_range without bounds"),
        ignored(
            f"{table}.curriculum.sampler", "all tasks are drawn alike",
            only(({"type": "standard"},), "all tasks are drawn alike",
                 "pools by reward are of another shape here: see environments[].curriculum.easy and .hard"),
        ),
        to(f"{table}.ratio", f"{ours}.ratio", by=optional),
        to(f"{table}.group_size", f"{ours}.group_size"),
        to(f"{table}.rollouts_per_example", f"{ours}.group_size"),
        to(f"{table}.num_workers", f"{ours}.workers", by=workers),
        to(f"{table}.timeout", f"{ours}.timeout_seconds", by=seconds_left),
        to(f"{table}.timeout.rollout", f"{ours}.timeout_seconds", by=seconds_left),
        to(f"{table}.timeout_seconds", f"{ours}.timeout_seconds", by=seconds_left),
        ignored(f"{table}.max_retries", "a rollout that fails is rejected and counted, and another one is started"),
        ignored(f"{table}.extra_env_kwargs", "seq_len and scoring are the run's own"),
        ignored(f"{table}.install", "environments are installed beforehand, with pip"),
        refused(
            f"{table}.address",
            "there is none: environments are played beside the orchestrator; environments[].image gives one its own container",
            f"{ours}.image",
        ),
        ignored(
            f"{table}.max_total_completion_tokens", "-1 is no limit",
            only((-1,), "-1 is no limit", "there is none: seq_len is the length of all turns together"),
        ),
        to(
            f"{table}.algo.type", f"{ours}.algorithm.advantage.name", f"{ours}.algorithm.loss.name",
            by=objective(_OF_ONE, _KNOWN, ours), text="opd: loss distill",
        ),
        to(
            f"{table}.algorithms", f"{ours}.algorithm.advantage.name", f"{ours}.algorithm.loss.name",
            by=algorithms(_OF_ONE, _KNOWN, ours), text="a list of one; opd: loss distill",
        ),
        to(f"{table}.algo.teacher.name", "algorithm.reference.model"),
        ignored(f"{table}.algo.teacher.*", "the teacher lies beside the policy in the trainer, without a server"),
        ignored(f"{table}.algo.*", _NO_OTHER, only((), "", "there is none here: see environments[].algorithm")),
        *of_sampling(f"{table}.sampling", f"{ours}.sampling"),
    )  # fmt: skip


def _of_played(table: str) -> tuple[Row, ...]:
    """Rows of what is said of training environments together; `table` ends with a dot."""
    return (
        *of_environment(f"{table}env[]"),
        *of_environment(f"{table}source[]"),
        *of_sampling(f"{table}sampling", "sampling"),
        to(f"{table}rollouts_per_example", "environments[].group_size", by=later("group_size"), text="of every environment that sets none"),
        to(f"{table}group_size", "environments[].group_size", by=later("group_size"), text="of every environment that sets none"),
        to(f"{table}num_workers", "environments[].workers", by=later("workers"), text="of every environment that sets none"),
        to(f"{table}workers_per_env", "environments[].workers", by=later("workers"), text="of every environment that sets none"),
        ignored(f"{table}max_retries", "a rollout that fails is rejected and counted, and another one is started"),
    )  # fmt: skip


def _of_evaluation(table: str) -> tuple[Row, ...]:
    ours = "evaluation"
    env = "an environment of evaluation"
    return (
        to(table, ours, by=later("evaluates")),
        to(f"{table}.interval", f"{ours}.interval"),
        to(f"{table}.num_examples", f"{ours}.num_tasks", by=all_or),
        to(f"{table}.num_tasks", f"{ours}.num_tasks", by=all_or),
        to(f"{table}.select.limit", f"{ours}.num_tasks", by=all_or),
        ignored(f"{table}.select.*", "tasks are those of the environment's eval split, from the first on"),
        ignored(f"{table}.skip_first_step", "the first version, the model itself, is always measured"),
        ignored(f"{table}.retrigger_on_resume", "a version is never measured twice"),
        to(f"{table}.rollouts_per_example", f"{ours}.samples_per_task"),
        to(f"{table}.group_size", f"{ours}.samples_per_task"),
        *of_sampling(f"{table}.sampling", f"{ours}.sampling"),
        to(f"{table}.env", ours, by=later("evaluated"), text=f"{env} is measured where the run trains on it too"),
        to(f"{table}.source", ours, by=later("evaluated"), text=f"{env} is measured where the run trains on it too"),
        ignored(f"{table}.eval_base_model", "the first version, the model itself, is always measured"),
        ignored(f"{table}.skip_eval_on_resume", "a version is never measured twice"),
        ignored(f"{table}.skip_eval_on_restart", "a version is never measured twice"),
        ignored(f"{table}.cancel_inflight_rollouts_on_eval", "training goes on beside an evaluation"),
        ignored(f"{table}.num_workers", "evaluation is played by the environment's own workers"),
        ignored(f"{table}.max_retries", "an episode that fails is counted as failed"),
    )  # fmt: skip


_BUFFER = (
    to("orchestrator.buffer.easy_threshold", "environments[].curriculum.easy.threshold", by=later("easy"), text="of every environment"),
    to("orchestrator.buffer.hard_threshold", "environments[].curriculum.hard.threshold", by=later("hard"), text="of every environment"),
    *(
        ignored(
            f"orchestrator.buffer.{name}_fraction", "0 takes none back",
            only(
                (0, 0.0), "0 takes none back",
                f"here environments[].curriculum.{name}.fraction is a share of draws, not of what is taken back",
            ),
        )
        for name in ("easy", "hard")
    ),
    to(
        "orchestrator.buffer.online_difficulty_filtering", "algorithm.filters.zero_variance",
        by=option_if({"algorithm.filters.zero_variance": True}),
    ),
    to("orchestrator.buffer.env_ratios", "environments[].ratio", by=later("ratios"), text="one of each environment, in order"),
    ignored("orchestrator.buffer.seed", "seed is that of everything random in the run"),
    ignored("orchestrator.buffer.hash_keys", "a task is known by its whole content"),
    ignored(
        "orchestrator.buffer.skip_verification", "false is the only way here",
        only((False,), "false is the only way here", "there is none: preset distill learns without rewards"),
    ),
)  # fmt: skip
_OF_ADVANTAGE = (
    to("orchestrator.advantage.type", f"{_ADVANTAGE}.name", by=choice({"default": "grpo"}, "there is none here; known: default")),
    to(
        "orchestrator.advantage.length_weighted_mean", f"{_ADVANTAGE}.name", by=option_if({f"{_ADVANTAGE}.name": "opo"}), text="true: opo"
    ),
    to(
        "orchestrator.advantage.normalize_by_pass_rate", f"{_ADVANTAGE}.name",
        by=option_if({f"{_ADVANTAGE}.name": "max_rl"}), text="true: max_rl",
    ),
    to(
        "orchestrator.advantage.std_norm", f"{_ADVANTAGE}.name", f"{_ADVANTAGE}.options",
        by=option_if({f"{_ADVANTAGE}.name": "grpo", f"{_ADVANTAGE}.options.std": "group"}), text="true: option std: group",
    ),
    to(
        "orchestrator.advantage.neg_clipped", f"{_ADVANTAGE}.name", f"{_ADVANTAGE}.options",
        by=option_if({f"{_ADVANTAGE}.name": "grpo", f"{_ADVANTAGE}.options.neg_clipped": True}), text="true: option neg_clipped",
    ),
    to(
        "orchestrator.advantage.leave_one_out", f"{_ADVANTAGE}.name", by=option_if({f"{_ADVANTAGE}.name": "rloo"}), text="true: rloo"
    ),
    refused(
        "orchestrator.advantage.length_bonus",
        "there is none: option length_penalty of algorithm.advantage takes length off", f"{_ADVANTAGE}.options",
    ),
    refused(
        "orchestrator.advantage.length_penalty",
        "there is none of that shape: option length_penalty of algorithm.advantage is a number", f"{_ADVANTAGE}.options",
    ),
    refused(
        "orchestrator.advantage.import_path",
        "there is none of that signature: algorithm.advantage.name takes package.module:function", f"{_ADVANTAGE}.name",
    ),
    ignored("orchestrator.advantage.kwargs", "they belong to import_path"),
)  # fmt: skip


def _of_algorithm(table: str) -> tuple[Row, ...]:
    known = _KNOWN
    return (
        to(
            f"{table}.type",
            f"{_ADVANTAGE}.name",
            "algorithm.preset",
            by=objective(_ALGORITHMS, known),
            text="opd: preset distill",
        ),
        to(f"{table}.teacher.name", "algorithm.reference.model"),
        ignored(f"{table}.teacher.*", "the teacher lies beside the policy in the trainer, without a server"),
        ignored(
            f"{table}.*", _NO_OTHER, only((), "", "there is none here: see algorithm.advantage and algorithm.loss")
        ),
        *of_loss(f"{table}.loss"),
    )


ROWS: tuple[Row, ...] = (
    *of_role("orchestrator."),
    *of_tokenizer("orchestrator."),
    to("orchestrator.model.name", "model.name", "model.path", by=place, text="a name with a path's form is model.path"),
    same("orchestrator.model.trust_remote_code", "model.trust_remote_code"),
    ignored("orchestrator.model.lora.name", "the run's adapter has the run's name"),
    ignored("orchestrator.lora_name", "the run's adapter has the run's name"),
    to("orchestrator.model.lora.rank", "trainer.lora.rank", by=optional),
    to("orchestrator.model.lora.alpha", "trainer.lora.alpha", by=optional),
    to("orchestrator.optim.lr", "trainer.optimizer.lr"),
    to("orchestrator.output_dir", "output_dir", by=later("orchestrator_output_dir"), text="where nothing else sets it"),
    same("orchestrator.batch_size"),
    same("orchestrator.oversampling_factor"),
    same("orchestrator.trajectory_strategy"),
    to("orchestrator.seed", "seed", by=optional),
    *_of_played("orchestrator."),
    *_of_played("orchestrator.train."),
    *_of_algorithm("orchestrator.algo"),
    *_of_algorithm("orchestrator.train.algo"),
    *_of_evaluation("orchestrator.eval"),
    to("orchestrator.val", "evaluation", by=later("validates")),
    to("orchestrator.val.interval", "evaluation.interval", by=later("validation_interval"), text="where there is no eval"),
    to("orchestrator.val.num_examples", "evaluation.num_tasks", by=later("validation_tasks"), text="where there is no eval"),
    to(
        "orchestrator.val.rollouts_per_example", "evaluation.samples_per_task",
        by=later("validation_samples"), text="where there is no eval",
    ),
    *_BUFFER,
    *_OF_ADVANTAGE,
    to("orchestrator.filters", "algorithm.filters", by=filters),
    to("orchestrator.pre_batch_filters", "algorithm.filters", by=filters),
    to("orchestrator.post_batch_filters", "algorithm.filters", by=filters),
    to(
        "orchestrator.mask_truncated_completions", "algorithm.filters.overlong_mask",
        by=option_if({"algorithm.filters.overlong_mask": True}),
    ),
    to("orchestrator.max_async_level", "algorithm.max_async_level", by=optional),
    to("orchestrator.async_level", "algorithm.max_async_level", by=optional),
    to("orchestrator.max_off_policy_steps", "algorithm.max_off_policy_steps"),
    ignored(
        "orchestrator.strict_async_level", "false is the only way here",
        only((False,), "false is the only way here", "there is none: max_off_policy_steps bounds what is trained on"),
    ),
    to("orchestrator.max_concurrent", "orchestrator.max_concurrency", by=optional),
    to("orchestrator.max_inflight_rollouts", "orchestrator.max_concurrency", by=optional),
    to("orchestrator.max_inflight_episodes", "orchestrator.max_concurrency", by=optional),
    to("orchestrator.max_inflight_groups", "orchestrator.max_concurrency", by=later("groups_in_flight"), text="times the group size"),
    to("orchestrator.concurrency.max_inflight", "orchestrator.max_concurrency", by=optional),
    ignored("orchestrator.concurrency.*", "the load on the engines is controlled by itself"),
    ignored("orchestrator.tasks_per_minute", "environments[].workers and orchestrator.max_concurrency bound the load"),
    ignored("orchestrator.num_train_workers", "the number of ranks is the trainer's"),
    ignored("orchestrator.use_token_client", "tokens go to the engine and come from it as they are"),
    ignored("orchestrator.client", _SERVER),
    ignored("orchestrator.client.*", _SERVER),
    ignored("orchestrator.client.base_url", _SERVER, own_server),
    refused("orchestrator.token_batch_size", "there is none: orchestrator.batch_size counts rollouts", "orchestrator.batch_size"),
    to("orchestrator.teacher_model.model.name", "algorithm.reference.model"),
    ignored("orchestrator.teacher_model.model.trust_remote_code", "it is that of the policy"),
    ignored("orchestrator.teacher_model.client", "the teacher lies beside the policy in the trainer, without a server"),
    refused(
        "orchestrator.teacher_rollout_model",
        "there is none: rollouts are the policy's own; synthesize writes a teacher's, which sft learns from",
    ),
    to(
        "orchestrator.algorithms", f"{_ADVANTAGE}.name", "algorithm.preset", by=algorithms(_ALGORITHMS, _KNOWN),
        text=f"a list of one of {_KNOWN}",
    ),
    ignored("orchestrator.reload_weights_on_start", "engines have the run's weights before the first rollout"),
    ignored("orchestrator.zero_truncated_completions", "false is the default here",
            only((False,), "false is the default here", "there is none: algorithm.filters.overlong_mask leaves them out")),
    ignored("orchestrator.eval.save", "answers and measures are kept in the run's folder"),
    ignored("orchestrator.eval.save_to_hf", "answers and measures are kept in the run's folder"),
    ignored("orchestrator.pool_size", "prompts are made into tokens by the orchestrator"),
    ignored("orchestrator.collect_inference_metrics", "the engines' metrics are collected"),
    ignored("orchestrator.env_install_prerelease", "environments are installed beforehand, with pip"),
    ignored("orchestrator.model.client", _SERVER),
    ignored("orchestrator.model.client.*", _SERVER),
    ignored("orchestrator.model.client.base_url", _SERVER, own_server),
    refused("orchestrator.actor", "there is none: rollouts are the policy's own"),
    refused("orchestrator.models", "there is none: algorithm.reference.model is the only other model", "algorithm.reference.model"),
    refused("orchestrator.env_server", "there is none: environments are played beside the orchestrator"),
)  # fmt: skip
