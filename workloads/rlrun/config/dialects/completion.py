"""Completion of a run with another project's names, from values that have a meaning only together with others.

This module sets only unset fields, so that files in our format, options and environment variables take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlrun.config.dialects.conversions import TEMPLATE_ARGUMENT
from rlrun.config.dialects.rows import ALL_TASKS, is_count, is_number
from rlrun.config.dialects.run_view import RunView, complete_data, complete_policies
from rlrun.config.dialects.translate import DIALECT, ENVIRONMENTS, PARALLEL, key_of
from rlrun.config.loading.layers import Hint, Layer
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.yaml_text import Key

_SEQ_LEN = 2048
MAX_STEPS = 100
"""Default of `max_steps`."""
_LOSSES = {
    "custom": "got 'custom'; a custom function has another signature here: algorithm.loss.name takes package.module:function",
    "sft": "got 'sft'; rollouts come from the policy itself: `rlrun synthesize` writes rollouts of a teacher for supervised fine-tuning",
}
"""Alternatives to losses that are not supported."""
_LEARNING: Mapping[str, object] = {
    "algorithm.loss.name": "dppo",
    "algorithm.filters.zero_variance": True,
    "orchestrator.batch_size": 128,
    "trainer.optimizer.weight_decay": 0.01,
}
"""PRIME-RL's defaults: its loss (whose options have the same defaults here), `filter_zero_advantages`, batch size and weight decay."""
_GROUP_SIZE = 1
"""PRIME-RL's default `group_size` of a source."""
PRIME_RL_MODEL = "Qwen/Qwen3-0.6B"
PRIME_RL_ENVIRONMENT = "verifiers:reverse-text"
"""Default model and environment of both versions of PRIME-RL."""


def complete_layer(layer: Layer, below: Key = ()) -> None:
    """Set the fields that follow from a layer's hints.

    Args:
        layer: layer with all sources merged; without hints nothing changes.
        below: path of the run's description in the layer's values.
    """
    if not layer.hints:
        return
    if DIALECT not in layer.hints:
        layer.hints[DIALECT] = Hint(None, next(iter(layer.hints.values())).origin)
    run = RunView(layer, below)
    for step in _STEPS:
        step(run)


def _share_run_values(run: RunView) -> None:
    """Set values of the whole run that PRIME-RL sets per role. There, roles may have different values."""
    for role in ("trainer", "orchestrator", "inference"):
        name = f"{role}_output_dir"
        folder = run.get_hint(name)
        if folder is None:
            continue
        run.set_field("output_dir", folder, name)
        if (own := run.get("output_dir")) != folder:
            run.report_notice(name, f"ignored: all roles of a run use one folder, {own}")
    if (seed := run.get_hint("inference_seed")) is not None:
        run.set_field("seed", seed, "inference_seed")


def _complete_groups(run: RunView) -> None:
    size = run.get_hint("group_size")
    if size is None:
        return
    if not [*run.environments()]:
        run.refuse_hint("group_size", "the files contain no environment; add one, and set its group_size")
    for i, environment in run.environments():
        own = environment.get("group_size")
        if own is not None and own != size and not _from_dialect(run, i):
            other = run.layer.origin((*run.below, "environments", i, "group_size"))
            line = "" if other.line is None else f":{other.line}"
            run.refuse_hint(
                "group_size", f"got {size!r}, but {other.source}{line} sets {other.path} to {own!r}; remove one"
            )
        run.set_field(f"environments[{i}].group_size", size, "group_size")


def _from_dialect(run: RunView, i: int) -> bool:
    return (
        ".env[" in (path := run.layer.origin((*run.below, "environments", i, "group_size")).path) or "source[" in path
    )


def _each_environment(run: RunView) -> None:
    ratios = run.get_hint("ratios")
    if isinstance(ratios, list) and (count := len([*run.environments()])) != len(ratios):
        run.refuse_hint(
            "ratios", f"has {len(ratios)} numbers for {count} environments; write one number per environment, in order"
        )
        ratios = None
    elif ratios is not None and not isinstance(ratios, list):
        run.refuse_hint("ratios", f"got {ratios!r:.60}, expected a list with one number per environment")
        ratios = None
    for i, environment in run.environments():
        path = f"environments[{i}]"
        if ratios is not None:
            run.set_field(f"{path}.ratio", ratios[i], "ratios")
        for pool in ("easy", "hard"):
            if run.get_hint(pool) is not None:
                run.set_field(f"{path}.curriculum.{pool}.threshold", run.get_hint(pool), pool)
                run.set_field(f"{path}.curriculum.{pool}.train", False, pool)
        if run.get_hint("workers") not in (None, "auto"):
            run.set_field(f"{path}.workers", run.get_hint("workers"), "workers")
        shared = run.get("sampling")
        if isinstance(environment.get("sampling"), dict) and isinstance(shared, dict):
            for name, value in shared.items():
                run.set_field(f"{path}.sampling.{name}", value, DIALECT, like=f"sampling.{name}")


def _complete_rate(run: RunView) -> None:
    low, lr = run.get_hint("min_lr"), run.get("trainer.optimizer.lr")
    if low is not None:
        peak = 1e-6 if lr is None else lr
        if is_number(low) and is_number(peak) and peak > 0:
            run.set_field("trainer.scheduler.min_lr_ratio", low / peak, "min_lr")
        else:
            run.set_field("trainer.scheduler.min_lr_ratio", low, "min_lr")
    decay, steps, warmup = run.get_hint("decay_steps"), run.get("max_steps"), run.get("trainer.scheduler.warmup_steps")
    if decay is None or run.get("trainer.scheduler.name") in (None, "constant"):
        return
    expected = steps - (warmup if is_count(warmup) else 0) if is_count(steps) else None
    if decay != expected:
        run.refuse_hint(
            "decay_steps",
            f"got {decay!r:.60}; a schedule decays from the end of the warm-up to max_steps ({steps}): write {expected}, or remove it",
        )


def _complete_objective(run: RunView) -> None:
    known = {"masked_is": ("masked_is", "v0.3"), "dppo": ("dppo", "today's")}
    name, kind = run.get("algorithm.loss.name"), run.get_hint("loss_type")
    if kind is not None and kind not in ("default", "ipo", "dppo", "masked_is"):
        run.refuse_hint(
            "loss_type", _LOSSES.get(str(kind), f"got {kind!r:.60}, which is not supported; known: default, ipo, dppo")
        )
    elif kind in ("ipo", "dppo") and name is None:
        run.set_field("algorithm.loss.name", kind, "loss_type")
    if run.get_hint("kl_tau") is not None:
        run.set_field("algorithm.loss.name", "masked_is" if kind is None else "dppo", "kl_tau")
        if run.get("algorithm.loss.name") in (*known, "ipo"):
            run.set_field("algorithm.loss.options.kl_tau", run.get_hint("kl_tau"), "kl_tau")
    scale = run.get_hint("adv_tau")
    if scale is not None and run.get("algorithm.loss.name") in ("masked_is", None) and kind is None:
        run.set_field("algorithm.loss.name", "masked_is", "adv_tau")
        run.set_field("algorithm.loss.options.adv_tau", scale, "adv_tau")
    elif scale is not None and scale != 1:
        run.refuse_hint(
            "adv_tau", f"got {scale!r:.60}, which this loss does not support; scale the learning rate instead"
        )
    strength = run.get("algorithm.loss.options.teacher_tau")
    if is_number(strength) and strength > 0:  # PRIME-RL's default teacher is the initial model
        run.set_field("algorithm.reference", {"model": "initial"}, DIALECT, like="algorithm.loss.options.teacher_tau")


def _complete_evaluation(run: RunView) -> None:
    names = {str(environment.get("name") or environment.get("id")) for _, environment in run.environments()}
    names |= {str(environment.get("id")).removeprefix("verifiers:") for _, environment in run.environments()}
    evaluated = run.get_hint("evaluated")
    others: list[str] = []
    if isinstance(evaluated, list):
        labels = [_environment_label(entry) for entry in evaluated]
        others = [label for label in labels if label not in names]
        if others:
            run.report_notice(
                "evaluated",
                f"not evaluated during the run: {', '.join(others[:10])}; evaluation uses held-out tasks of the run's own environments; "
                "run `rlrun eval` afterwards to evaluate the checkpoints in other environments",
            )
        if labels and len(others) == len(labels):
            _drop_hint(run, "evaluation")
            return
        known = [entry for entry in evaluated if isinstance(entry, dict) and _environment_label(entry) in names]
        _complete_samples(run, known)
    elif evaluated is not None:
        run.refuse_hint("evaluated", f"got {evaluated!r:.60}, expected a list of tables")
    if run.get_hint("evaluates") is not None and run.get("evaluation") is None:
        run.set_field("evaluation", {}, "evaluates")


def _complete_validation(run: RunView) -> None:
    if run.get_hint("validates") is not None and run.get("evaluation") is None:
        run.set_field("evaluation", {}, "validates")
        for ours, name in (("interval", "interval"), ("num_tasks", "tasks"), ("samples_per_task", "samples")):
            if (value := run.get_hint(f"validation_{name}")) is not None:
                is_all = ours == "num_tasks" and value == -1
                run.set_field(f"evaluation.{ours}", ALL_TASKS if is_all else value, f"validation_{name}")


def _complete_samples(run: RunView, own: list[dict[str, Any]]) -> None:
    """Set the numbers of tasks and samples, which PRIME-RL sets per environment, for all environments."""
    for ours, theirs in (
        ("samples_per_task", ("rollouts_per_example", "group_size")),
        ("num_tasks", ("num_examples",)),
    ):
        found = [entry[name] for entry in own for name in theirs if is_count(entry.get(name))]
        if found:
            run.set_field("evaluation", {}, "evaluated")
            run.set_field(f"evaluation.{ours}", max(found), "evaluated")


def _drop_hint(run: RunView, path: str) -> None:
    place: Any = run.layer.values
    for part in run.below:
        place = place.get(part, {}) if isinstance(place, dict) else {}
    if isinstance(place, dict):
        place.pop(path, None)
    key = (*run.below, path)
    for old in [origin for origin in run.layer.origins if origin[: len(key)] == key]:
        del run.layer.origins[old]


def _environment_label(entry: Any) -> str:
    if not isinstance(entry, dict):
        return repr(entry)[:60]
    nested = entry.get("taskset") or (entry["env"].get("taskset") if isinstance(entry.get("env"), dict) else None)
    given = entry.get("name") or entry.get("id") or (nested.get("id") if isinstance(nested, dict) else None)
    return str(given or "reverse-text").partition("@")[0].rpartition("/")[2][:60]


def _complete_machines(run: RunView) -> None:
    per_node = run.get_hint("gpus_per_node") or 8
    _trainer_gpus(run, per_node)
    _inference_gpus(run, per_node)
    _engine_nodes(run)
    _engine_gpus(run)


def _trainer_gpus(run: RunView, per_node: int) -> None:
    """Set the trainer's replicas, one per node, and their GPUs."""
    total, name = _read_gpus(run, "trainer")
    nodes = run.get_hint("trainer_nodes")
    if total is not None or nodes is not None:
        run.set_field("trainer.gpus_per_replica", per_node if nodes is not None else total, name)
    if nodes is not None:
        run.set_field("trainer.replicas", nodes, name)


def _inference_gpus(run: RunView, per_node: int) -> None:
    """Set the engines on all GPUs of inference."""
    total, name = _read_gpus(run, "inference")
    nodes = run.get_hint("inference_nodes")
    if (total is not None or nodes is not None) and run.get("data") is None:  # fine-tuning has no engines
        _divide_engines(run, total or nodes * per_node * (run.get_hint("inference_groups") or 1), per_node, name)


def _engine_nodes(run: RunView) -> None:
    """Replace an engine on several nodes by one engine per node; refuse it if its experts are distributed over the nodes."""
    engines = run.get_hint("engine_nodes")
    if engines is None or engines <= 1:
        return
    if "--enable-expert-parallel" in (run.get("inference.extra_args") or ()):
        run.refuse_hint(
            "engine_nodes", f"got {engines}, but an engine runs on one node; remove enable_expert_parallel, or write 1"
        )
    else:
        run.set_field("inference.replicas", engines, "engine_nodes")


def _engine_gpus(run: RunView) -> None:
    """Set the GPUs of an engine if only its parallelism is set."""
    if not run.get_hint(PARALLEL) or run.get("inference.gpus_per_replica") is not None:
        return
    tp, dp = run.get("inference.tensor_parallel") or 1, run.get("inference.data_parallel") or 1
    if is_count(tp) and is_count(dp) and tp * dp > 1:
        run.set_field("inference.gpus_per_replica", tp * dp, PARALLEL)


def _read_gpus(run: RunView, role: str) -> tuple[int | None, str]:
    """Return the number of GPUs of a role, or None, and the hint that sets the number of GPUs or nodes."""
    ids, count = run.get_hint(f"{role}_gpu_ids"), run.get_hint(f"{role}_gpus")
    if ids is not None:
        return len(ids), f"{role}_gpu_ids"
    return count, f"{role}_gpus" if count is not None else f"{role}_nodes"


def _read_replication(run: RunView) -> None:
    group, nodes = run.get_hint("nodes_per_group"), run.get_hint("trainer_nodes")
    if group is None or nodes is None:
        return
    if nodes % group:
        run.refuse_hint("nodes_per_group", f"got {group}, expected a divisor of the number of training nodes ({nodes})")
    else:
        run.set_field("trainer.parallelism.dp_replicate", nodes // group, "nodes_per_group")


def _divide_engines(run: RunView, total: int, per_node: int, hint: str) -> None:
    """Divide `total` GPUs into engines: copies of the model in one server, and servers of at most one node."""
    tp, dp = run.get("inference.tensor_parallel") or 1, run.get("inference.data_parallel")
    if not is_count(tp) or total % tp:
        run.refuse_hint(
            hint, f"{total} GPUs cannot be divided into engines with tensor_parallel {tp}; change one of them"
        )
        return
    copies = total // tp
    if is_count(dp):
        run.set_field("inference.gpus_per_replica", tp * dp, hint)
        run.set_field("inference.replicas", max(1, copies // dp), hint)
        return
    # Fill whole nodes if the GPUs and one copy of the model allow it, otherwise use one server.
    replicas = max(1, total // per_node) if total % per_node == 0 and per_node >= tp else 1
    each = copies // replicas
    run.set_field("inference.replicas", replicas, hint)
    run.set_field("inference.data_parallel", each, hint)
    run.set_field("inference.gpus_per_replica", tp * each, hint)


def _complete_lengths(run: RunView) -> None:
    packed = run.get_hint("packed_length")
    if packed is not None:
        run.set_field("seq_len", packed, "packed_length")
        if is_count(packed) and is_count(seq := run.get("seq_len")) and packed > seq:
            run.set_field("trainer.micro_batch_tokens", packed, "packed_length")
    seq_len = run.get("seq_len") if run.get("seq_len") is not None else _SEQ_LEN
    longest = run.get_hint("max_model_len")
    if longest is not None:
        if run.get_hint(ENVIRONMENTS) and is_count(longest) and is_count(seq_len) and longest < seq_len:
            run.report_notice(
                "max_model_len", f"got {longest}, raised to seq_len ({seq_len}), the length of a full sample"
            )
            longest = seq_len
        run.set_field("inference.max_model_len", longest, "max_model_len")
    if not is_count(seq_len) or seq_len < 2 or not [*run.environments()]:
        return
    if not run.get_hint(ENVIRONMENTS):
        return
    # a reply may be as long as the engine's context
    run.set_field("sampling.max_tokens", seq_len - 1, ENVIRONMENTS, like="seq_len")
    for path in ("sampling", "evaluation.sampling", *(f"environments[{i}].sampling" for i, _ in run.environments())):
        given = run.get(f"{path}.max_tokens")
        if is_count(given) and given >= seq_len:
            origin = run.layer.origin((*run.below, *key_of(f"{path}.max_tokens")))
            text = f"got {given}, lowered to {seq_len - 1}: seq_len ({seq_len}) also includes the prompt"
            run.layer.notices.append(Problem(origin.source, origin.path, text, origin.line))
            run.set_field(f"{path}.max_tokens", seq_len - 1, DIALECT, over=True)
            run.layer.origins[(*run.below, *key_of(f"{path}.max_tokens"))] = origin


def _template_arguments(run: RunView) -> None:
    """Set arguments of the chat template in the run's sampling and in each sampling that replaces it."""
    own = ("evaluation.sampling", *(f"environments[{i}].sampling" for i, _ in run.environments()))
    for label in [label for label in run.layer.hints if label.startswith(TEMPLATE_ARGUMENT)]:
        name = label.removeprefix(TEMPLATE_ARGUMENT)
        for path in ("sampling", *(path for path in own if run.get(path) is not None)):
            run.set_field(f"{path}.chat_template_arguments.{name}", run.get_hint(label), label)


def _in_flight(run: RunView) -> None:
    groups = run.get_hint("groups_in_flight")
    sizes = [environment.get("group_size") for _, environment in run.environments()]
    if groups is not None:
        size = next((size for size in sizes if is_count(size)), 8)
        run.set_field("orchestrator.max_concurrency", groups * size if is_count(groups) else groups, "groups_in_flight")
    batch, size = run.get("orchestrator.batch_size"), run.get_hint("group_size")
    if (
        run.get_hint(ENVIRONMENTS)
        and batch is None
        and is_count(size)
        and 64 % size
        and not any(True for other in sizes if other != size)
    ):
        run.set_field("orchestrator.batch_size", size * max(1, 64 // size), "group_size")


def complete_learning(layer: Layer, task: object) -> None:
    """Set the other project's default objective and weight decay if nothing sets them, and report them in one note.

    The objective is set only for a whole RL run, and the weight decay also for a supervised run. The objective does not change if the run
    sets a preset, loss or advantage with our names.

    Args:
        layer: layer with all sources merged.
        task: task of the run; only RL and SFT have these defaults.
    """
    if DIALECT not in layer.hints or layer.hints[DIALECT].value != "PRIME-RL" or task not in ("RL", "SFT"):
        return
    run = RunView(layer, ())
    if run.get("max_steps") is None:
        steps = f"not set: PRIME-RL runs until it is stopped, but this run ends after the default of {MAX_STEPS} steps"
        layer.notices.append(Problem(layer.hints[DIALECT].origin.source, "max_steps", steps))
    learning = {path: value for path, value in _LEARNING.items() if task == "RL" or path.startswith("trainer.")}
    if task == "RL":
        learning |= {f"environments[{i}].group_size": _GROUP_SIZE for i, _ in run.environments()}
    given = {path: run.get(path) for path in (*learning, "algorithm.preset")}
    for path, value in learning.items():
        if given[path] is None and (given["algorithm.preset"] is None or not path.startswith("algorithm.")):
            run.set_field(path, value, DIALECT)
            layer.origins[key_of(path)] = replace(layer.hints[DIALECT].origin, path="", line=None)
    added = [f"{path} {run.get(path)}" for path in learning if given[path] is None and run.get(path) is not None]
    if added:
        origin = layer.hints[DIALECT].origin
        shown = ", ".join(added).replace("algorithm.loss.name", "loss").replace("True", "true")
        place = "algorithm" if task == "RL" else "optim"
        layer.notices.append(Problem(origin.source, place, f"not set: PRIME-RL's own defaults, {shown}"))


def complete_gpus(layer: Layer, gpus: int) -> None:
    """Set one GPU each for trainer and engines, the other project's default, if nothing sets their GPUs.

    Args:
        layer: layer with all sources merged.
        gpus: number of GPUs of this machine.
    """
    if DIALECT not in layer.hints or layer.hints[DIALECT].value != "PRIME-RL" or gpus < 2:
        return
    run = RunView(layer, ())
    if run.get("trainer.gpus_per_replica") is not None or run.get("inference.gpus_per_replica") is not None:
        return
    for role in ("trainer", "inference"):
        run.set_field(f"{role}.gpus_per_replica", 1, DIALECT)
        layer.origins[(role, "gpus_per_replica")] = replace(layer.hints[DIALECT].origin, path="", line=None)
    notice = "not set: one GPU for training and one for inference, as in PRIME-RL; --trainer-gpu-ids and --inference-gpu-ids change it"
    layer.notices.append(Problem(layer.hints[DIALECT].origin.source, "trainer.gpus_per_replica", notice))


def complete_environments(layer: Layer) -> None:
    """Set the default environment of the other project's orchestrator if its own file sets none, and report it."""
    if DIALECT not in layer.hints or layer.values.get("environments") or layer.values.get("task", "RL") != "RL":
        return
    origin = replace(layer.hints[DIALECT].origin, path="", line=None)
    layer.values["environments"] = [{"id": PRIME_RL_ENVIRONMENT}]
    layer.origins[("environments",)] = origin
    notice = f"not set: PRIME-RL's own default, {PRIME_RL_ENVIRONMENT}"
    layer.notices.append(Problem(origin.source, "environments", notice))


def complete_model(layer: Layer) -> None:
    """Set the other project's default model if a run with its names sets none, and report it.

    Only for a whole run: if a run has several files, all but one may omit the model.
    """
    if DIALECT not in layer.hints or "model" in layer.values or layer.hints[DIALECT].value != "PRIME-RL":
        return
    origin = layer.hints[DIALECT].origin
    layer.values["model"] = {"name": PRIME_RL_MODEL}
    layer.origins[("model",)] = layer.origins[("model", "name")] = replace(origin, path="", line=None)
    notice = f"not set: PRIME-RL's own default, {PRIME_RL_MODEL}"
    layer.notices.append(Problem(origin.source, "model.name", notice))


_STEPS: tuple[Callable[[RunView], None], ...] = (
    *(
        _share_run_values,
        _complete_groups,
        _each_environment,
        _complete_rate,
        _complete_objective,
        _complete_evaluation,
        _complete_validation,
        _complete_machines,
        _read_replication,
    ),
    *(_complete_lengths, _template_arguments, _in_flight, complete_data, complete_policies),
)
