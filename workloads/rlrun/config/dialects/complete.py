"""Completion of a run in another project's names, from values that mean something only beside each other.

Only fields that nothing sets are set here, so that a file of ours, an option and a variable win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlrun.config.dialects.conversions import TEMPLATE_ARGUMENT
from rlrun.config.dialects.other_tasks import complete_data, complete_policies
from rlrun.config.dialects.run_view import RunView
from rlrun.config.dialects.translate import DIALECT, ENVIRONMENTS, PARALLEL, key_of
from rlrun.config.dialects.values import ALL_TASKS, is_count, is_number
from rlrun.config.loading.layers import Hint, Layer
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.yaml_text import Key

_SEQ_LEN = 2048
MAX_STEPS = 100
"""Default of `max_steps`."""
_LOSSES = {
    "custom": "got 'custom'; a function of your own has another signature: algorithm.loss.name takes package.module:function",
    "sft": "got 'sft'; rollouts are the policy's own: `rlrun synthesize` writes a teacher's, which sft learns from",
}
"""Counterparts of losses that are not here."""
_LEARNING: Mapping[str, object] = {
    "algorithm.loss.name": "dppo",
    "algorithm.filters.zero_variance": True,
    "orchestrator.batch_size": 128,
    "trainer.optimizer.weight_decay": 0.01,
}
"""PRIME-RL's loss (with this project's options of it, which are the same), `filter_zero_advantages`, batch and weight decay."""
_GROUP_SIZE = 1
"""PRIME-RL's `group_size` of a source that sets none."""
PRIME_RL_MODEL = "Qwen/Qwen3-0.6B"
PRIME_RL_ENVIRONMENT = "verifiers:reverse-text"
"""Model and environment of PRIME-RL's files that name none, in both of their versions."""


def complete_layer(layer: Layer, below: Key = ()) -> None:
    """Set what follows from a layer's hints.

    Args:
        layer: all sources as one; nothing happens without hints.
        below: place of the run's description in its values.
    """
    if not layer.hints:
        return
    if DIALECT not in layer.hints:
        layer.hints[DIALECT] = Hint(None, next(iter(layer.hints.values())).origin)
    run = RunView(layer, below)
    for step in _STEPS:
        step(run)


def _share_run_values(run: RunView) -> None:
    """Values of a role's table for the whole run, where the run itself has none: there, roles may differ."""
    for role in ("trainer", "orchestrator", "inference"):
        name = f"{role}_output_dir"
        folder = run.hint(name)
        if folder is None:
            continue
        run.put("output_dir", folder, name)
        if (own := run.get("output_dir")) != folder:
            run.note(name, f"ignored: the roles of a run have one folder, {own}")
    if (seed := run.hint("inference_seed")) is not None:
        run.put("seed", seed, "inference_seed")


def _complete_groups(run: RunView) -> None:
    size = run.hint("group_size")
    if size is None:
        return
    if not [*run.environments()]:
        run.refuse("group_size", "there is no environment in the files; set its group_size")
    for i, one in run.environments():
        own = one.get("group_size")
        if own is not None and own != size and not _from_dialect(run, i):
            other = run.layer.origin((*run.below, "environments", i, "group_size"))
            line = "" if other.line is None else f":{other.line}"
            run.refuse("group_size", f"got {size!r}, but {other.source}{line} sets {other.path} to {own!r}; remove one")
        run.put(f"environments[{i}].group_size", size, "group_size")


def _from_dialect(run: RunView, i: int) -> bool:
    return (
        ".env[" in (path := run.layer.origin((*run.below, "environments", i, "group_size")).path) or "source[" in path
    )


def _each_environment(run: RunView) -> None:
    ratios = run.hint("ratios")
    if isinstance(ratios, list) and (count := len([*run.environments()])) != len(ratios):
        run.refuse("ratios", f"has {len(ratios)} numbers for {count} environments; write one for each, in their order")
        ratios = None
    elif ratios is not None and not isinstance(ratios, list):
        run.refuse("ratios", f"got {ratios!r:.60}, expected a list of numbers, one for each environment")
        ratios = None
    for i, one in run.environments():
        path = f"environments[{i}]"
        if ratios is not None:
            run.put(f"{path}.ratio", ratios[i], "ratios")
        for pool in ("easy", "hard"):
            if run.hint(pool) is not None:
                run.put(f"{path}.curriculum.{pool}.threshold", run.hint(pool), pool)
                run.put(f"{path}.curriculum.{pool}.train", False, pool)
        if run.hint("workers") not in (None, "auto"):
            run.put(f"{path}.workers", run.hint("workers"), "workers")
        shared = run.get("sampling")
        if isinstance(one.get("sampling"), dict) and isinstance(shared, dict):
            for name, value in shared.items():
                run.put(f"{path}.sampling.{name}", value, DIALECT, like=f"sampling.{name}")


def _complete_rate(run: RunView) -> None:
    low, lr = run.hint("min_lr"), run.get("trainer.optimizer.lr")
    if low is not None:
        peak = 1e-6 if lr is None else lr
        if is_number(low) and is_number(peak) and peak > 0:
            run.put("trainer.scheduler.min_lr_ratio", low / peak, "min_lr")
        else:
            run.put("trainer.scheduler.min_lr_ratio", low, "min_lr")
    decay, steps, warmup = run.hint("decay_steps"), run.get("max_steps"), run.get("trainer.scheduler.warmup_steps")
    if decay is None or run.get("trainer.scheduler.name") in (None, "constant"):
        return
    whole = steps - (warmup if is_count(warmup) else 0) if is_count(steps) else None
    if decay != whole:
        run.refuse(
            "decay_steps",
            f"got {decay!r:.60}; a schedule decays from the end of the warm-up to max_steps ({steps}): write {whole}, or remove it",
        )


def _complete_objective(run: RunView) -> None:
    known = {"masked_is": ("masked_is", "v0.3"), "dppo": ("dppo", "today's")}
    name, kind = run.get("algorithm.loss.name"), run.hint("loss_type")
    if kind is not None and kind not in ("default", "ipo", "dppo", "masked_is"):
        run.refuse(
            "loss_type", _LOSSES.get(str(kind), f"got {kind!r:.60}; there is none here; known: default, ipo, dppo")
        )
    elif kind in ("ipo", "dppo") and name is None:
        run.put("algorithm.loss.name", kind, "loss_type")
    if run.hint("kl_tau") is not None:
        run.put("algorithm.loss.name", "masked_is" if kind is None else "dppo", "kl_tau")
        if run.get("algorithm.loss.name") in (*known, "ipo"):
            run.put("algorithm.loss.options.kl_tau", run.hint("kl_tau"), "kl_tau")
    scale = run.hint("adv_tau")
    if scale is not None and run.get("algorithm.loss.name") in ("masked_is", None) and kind is None:
        run.put("algorithm.loss.name", "masked_is", "adv_tau")
        run.put("algorithm.loss.options.adv_tau", scale, "adv_tau")
    elif scale is not None and scale != 1:
        run.refuse("adv_tau", f"got {scale!r:.60}; there is none in this loss: the learning rate scales the advantage")
    strength = run.get("algorithm.loss.options.teacher_tau")
    if (
        is_number(strength) and strength > 0
    ):  # their teacher is the model as it was at the start, unless another one is named
        run.put("algorithm.reference", {"model": "initial"}, DIALECT, like="algorithm.loss.options.teacher_tau")


def _complete_evaluation(run: RunView) -> None:
    names = {str(one.get("name") or one.get("id")) for _, one in run.environments()}
    names |= {str(one.get("id")).removeprefix("verifiers:") for _, one in run.environments()}
    evaluated = run.hint("evaluated")
    others: list[str] = []
    if isinstance(evaluated, list):
        labels = [_environment_label(one) for one in evaluated]
        others = [label for label in labels if label not in names]
        if others:
            run.note(
                "evaluated",
                f"not measured during the run: {', '.join(others[:10])}; evaluation asks held-out tasks of the run's own environments; "
                "`rlrun eval` measures its checkpoints in others afterwards",
            )
        if labels and len(others) == len(labels):
            _drop_hint(run, "evaluation")
            return
        _complete_samples(run, [one for one in evaluated if isinstance(one, dict) and _environment_label(one) in names])
    elif evaluated is not None:
        run.refuse("evaluated", f"got {evaluated!r:.60}, expected a list of tables")
    if run.hint("evaluates") is not None and run.get("evaluation") is None:
        run.put("evaluation", {}, "evaluates")


def _complete_validation(run: RunView) -> None:
    if run.hint("validates") is not None and run.get("evaluation") is None:
        run.put("evaluation", {}, "validates")
        for ours, name in (("interval", "interval"), ("num_tasks", "tasks"), ("samples_per_task", "samples")):
            if (value := run.hint(f"validation_{name}")) is not None:
                whole = ours == "num_tasks" and value == -1
                run.put(f"evaluation.{ours}", ALL_TASKS if whole else value, f"validation_{name}")


def _complete_samples(run: RunView, own: list[dict[str, Any]]) -> None:
    """Numbers of one environment's evaluation, which here are those of all."""
    for ours, theirs in (
        ("samples_per_task", ("rollouts_per_example", "group_size")),
        ("num_tasks", ("num_examples",)),
    ):
        found = [one[name] for one in own for name in theirs if is_count(one.get(name))]
        if found:
            run.put("evaluation", {}, "evaluated")
            run.put(f"evaluation.{ours}", max(found), "evaluated")


def _drop_hint(run: RunView, path: str) -> None:
    place: Any = run.layer.values
    for part in run.below:
        place = place.get(part, {}) if isinstance(place, dict) else {}
    if isinstance(place, dict):
        place.pop(path, None)
    key = (*run.below, path)
    for old in [one for one in run.layer.origins if one[: len(key)] == key]:
        del run.layer.origins[old]


def _environment_label(one: Any) -> str:
    if not isinstance(one, dict):
        return repr(one)[:60]
    nested = one.get("taskset") or (one["env"].get("taskset") if isinstance(one.get("env"), dict) else None)
    given = one.get("name") or one.get("id") or (nested.get("id") if isinstance(nested, dict) else None)
    return str(given or "reverse-text").partition("@")[0].rpartition("/")[2][:60]


def _complete_machines(run: RunView) -> None:
    per_node = run.hint("gpus_per_node") or 8
    _trainer_gpus(run, per_node)
    _inference_gpus(run, per_node)
    _engine_nodes(run)
    _engine_gpus(run)


def _trainer_gpus(run: RunView, per_node: int) -> None:
    """The trainer's replicas, which are its nodes, and their GPUs."""
    total, name = _read_gpus(run, "trainer")
    nodes = run.hint("trainer_nodes")
    if total is not None or nodes is not None:
        run.put("trainer.gpus_per_replica", per_node if nodes is not None else total, name)
    if nodes is not None:
        run.put("trainer.replicas", nodes, name)


def _inference_gpus(run: RunView, per_node: int) -> None:
    """The engines on all GPUs of inference."""
    total, name = _read_gpus(run, "inference")
    nodes = run.hint("inference_nodes")
    if (total is not None or nodes is not None) and run.get("data") is None:  # fine-tuning has no engines
        _divide_engines(run, total or nodes * per_node * (run.hint("inference_groups") or 1), per_node, name)


def _engine_nodes(run: RunView) -> None:
    """An engine of several nodes, which here is as many engines; refused where its experts lie on all of them."""
    engines = run.hint("engine_nodes")
    if engines is None or engines <= 1:
        return
    if "--enable-expert-parallel" in (run.get("inference.extra_args") or ()):
        run.refuse(
            "engine_nodes", f"got {engines}; an engine is on one node: remove enable_expert_parallel, or write 1"
        )
    else:
        run.put("inference.replicas", engines, "engine_nodes")


def _engine_gpus(run: RunView) -> None:
    """The GPUs of an engine from its parallelism alone."""
    if not run.hint(PARALLEL) or run.get("inference.gpus_per_replica") is not None:
        return
    tp, dp = run.get("inference.tensor_parallel") or 1, run.get("inference.data_parallel") or 1
    if is_count(tp) and is_count(dp) and tp * dp > 1:
        run.put("inference.gpus_per_replica", tp * dp, PARALLEL)


def _read_gpus(run: RunView, role: str) -> tuple[int | None, str]:
    """Number of GPUs of a role, None where nothing says it; and the hint that it, or the number of nodes, comes from."""
    ids, count = run.hint(f"{role}_gpu_ids"), run.hint(f"{role}_gpus")
    if ids is not None:
        return len(ids), f"{role}_gpu_ids"
    return count, f"{role}_gpus" if count is not None else f"{role}_nodes"


def _read_replication(run: RunView) -> None:
    group, nodes = run.hint("nodes_per_group"), run.hint("trainer_nodes")
    if group is None or nodes is None:
        return
    if nodes % group:
        run.refuse("nodes_per_group", f"got {group}, expected a divisor of the number of training nodes ({nodes})")
    else:
        run.put("trainer.parallelism.dp_replicate", nodes // group, "nodes_per_group")


def _divide_engines(run: RunView, total: int, per_node: int, hint: str) -> None:
    """Engines on `total` GPUs: copies of the model within one server, servers of at most a node."""
    tp, dp = run.get("inference.tensor_parallel") or 1, run.get("inference.data_parallel")
    if not is_count(tp) or total % tp:
        run.refuse(hint, f"{total} GPUs cannot be divided into engines of tensor_parallel {tp}; change one of them")
        return
    copies = total // tp
    if is_count(dp):
        run.put("inference.gpus_per_replica", tp * dp, hint)
        run.put("inference.replicas", max(1, copies // dp), hint)
        return
    replicas = max(1, total // per_node) if total % per_node == 0 and per_node >= tp else 1
    each = copies // replicas
    run.put("inference.replicas", replicas, hint)
    run.put("inference.data_parallel", each, hint)
    run.put("inference.gpus_per_replica", tp * each, hint)


def _complete_lengths(run: RunView) -> None:
    packed = run.hint("packed_length")
    if packed is not None:
        run.put("seq_len", packed, "packed_length")
        if is_count(packed) and is_count(seq := run.get("seq_len")) and packed > seq:
            run.put("trainer.micro_batch_tokens", packed, "packed_length")
    seq_len = run.get("seq_len") if run.get("seq_len") is not None else _SEQ_LEN
    longest = run.hint("max_model_len")
    if longest is not None:
        if run.hint(ENVIRONMENTS) and is_count(longest) and is_count(seq_len) and longest < seq_len:
            run.note("max_model_len", f"got {longest}, raised to seq_len ({seq_len}), the length of a whole sample")
            longest = seq_len
        run.put("inference.max_model_len", longest, "max_model_len")
    if not is_count(seq_len) or seq_len < 2 or not [*run.environments()]:
        return
    if not run.hint(ENVIRONMENTS):
        return
    # a reply may be as long as the engine's context
    run.put("sampling.max_tokens", seq_len - 1, ENVIRONMENTS, like="seq_len")
    for path in ("sampling", "evaluation.sampling", *(f"environments[{i}].sampling" for i, _ in run.environments())):
        given = run.get(f"{path}.max_tokens")
        if is_count(given) and given >= seq_len:
            origin = run.layer.origin((*run.below, *key_of(f"{path}.max_tokens")))
            text = f"got {given}, lowered to {seq_len - 1}: seq_len ({seq_len}) holds the prompt too"
            run.layer.notices.append(Problem(origin.source, origin.path, text, origin.line))
            run.put(f"{path}.max_tokens", seq_len - 1, DIALECT, over=True)
            run.layer.origins[(*run.below, *key_of(f"{path}.max_tokens"))] = origin


def _template_arguments(run: RunView) -> None:
    """Set arguments of the chat template, in the run's sampling and in each sampling that goes before it."""
    own = ("evaluation.sampling", *(f"environments[{i}].sampling" for i, _ in run.environments()))
    for label in [label for label in run.layer.hints if label.startswith(TEMPLATE_ARGUMENT)]:
        name = label.removeprefix(TEMPLATE_ARGUMENT)
        for path in ("sampling", *(path for path in own if run.get(path) is not None)):
            run.put(f"{path}.chat_template_arguments.{name}", run.hint(label), label)


def _in_flight(run: RunView) -> None:
    groups = run.hint("groups_in_flight")
    sizes = [one.get("group_size") for _, one in run.environments()]
    if groups is not None:
        size = next((size for size in sizes if is_count(size)), 8)
        run.put("orchestrator.max_concurrency", groups * size if is_count(groups) else groups, "groups_in_flight")
    batch, size = run.get("orchestrator.batch_size"), run.hint("group_size")
    if (
        run.hint(ENVIRONMENTS)
        and batch is None
        and is_count(size)
        and 64 % size
        and not any(True for one in sizes if one != size)
    ):
        run.put("orchestrator.batch_size", size * max(1, 64 // size), "group_size")


def complete_learning(layer: Layer, task: object) -> None:
    """Set the objective and the weight decay that the other project has where nothing sets them, and report it in one note.

    Of a whole run alone, and of a supervised one its weight decay; a preset, loss or advantage in our names leaves the objective
    as it is.

    Args:
        layer: all sources as one.
        task: the run's task; of others than RL and SFT nothing is set.
    """
    if DIALECT not in layer.hints or layer.hints[DIALECT].value != "PRIME-RL" or task not in ("RL", "SFT"):
        return
    run = RunView(layer, ())
    if run.get("max_steps") is None:
        steps = (
            f"not set: PRIME-RL goes on until it is stopped; this run ends after the default here, {MAX_STEPS} steps"
        )
        layer.notices.append(Problem(layer.hints[DIALECT].origin.source, "max_steps", steps))
    learning = {path: value for path, value in _LEARNING.items() if task == "RL" or path.startswith("trainer.")}
    if task == "RL":
        learning |= {f"environments[{i}].group_size": _GROUP_SIZE for i, _ in run.environments()}
    given = {path: run.get(path) for path in (*learning, "algorithm.preset")}
    for path, value in learning.items():
        if given[path] is None and (given["algorithm.preset"] is None or not path.startswith("algorithm.")):
            run.put(path, value, DIALECT)
            layer.origins[key_of(path)] = replace(layer.hints[DIALECT].origin, path="", line=None)
    added = [f"{path} {run.get(path)}" for path in learning if given[path] is None and run.get(path) is not None]
    if added:
        origin = layer.hints[DIALECT].origin
        shown = ", ".join(added).replace("algorithm.loss.name", "loss").replace("True", "true")
        place = "algorithm" if task == "RL" else "optim"
        layer.notices.append(Problem(origin.source, place, f"not set: PRIME-RL's own defaults, {shown}"))


def complete_gpus(layer: Layer, gpus: int) -> None:
    """Give trainer and engines one GPU each, as the other project does, if nothing names any.

    Args:
        layer: all sources as one.
        gpus: GPUs of this machine.
    """
    if DIALECT not in layer.hints or layer.hints[DIALECT].value != "PRIME-RL" or gpus < 2:
        return
    run = RunView(layer, ())
    if run.get("trainer.gpus_per_replica") is not None or run.get("inference.gpus_per_replica") is not None:
        return
    for role in ("trainer", "inference"):
        run.put(f"{role}.gpus_per_replica", 1, DIALECT)
        layer.origins[(role, "gpus_per_replica")] = replace(layer.hints[DIALECT].origin, path="", line=None)
    said = (
        "not set: one GPU trains and one samples, as in PRIME-RL; --trainer-gpu-ids and --inference-gpu-ids change it"
    )
    layer.notices.append(Problem(layer.hints[DIALECT].origin.source, "trainer.gpus_per_replica", said))


def complete_environments(layer: Layer) -> None:
    """Set the environment that the other project's orchestrator starts with where its own file names none, and say so."""
    if DIALECT not in layer.hints or layer.values.get("environments") or layer.values.get("task", "RL") != "RL":
        return
    origin = replace(layer.hints[DIALECT].origin, path="", line=None)
    layer.values["environments"] = [{"id": PRIME_RL_ENVIRONMENT}]
    layer.origins[("environments",)] = origin
    said = f"not set: PRIME-RL's own default, {PRIME_RL_ENVIRONMENT}"
    layer.notices.append(Problem(origin.source, "environments", said))


def complete_model(layer: Layer) -> None:
    """Set the model that the other project starts from where a run in its names has none, and say so.

    Of a whole run alone: of several files of a run, each but one may leave it out.
    """
    if DIALECT not in layer.hints or "model" in layer.values or layer.hints[DIALECT].value != "PRIME-RL":
        return
    origin = layer.hints[DIALECT].origin
    layer.values["model"] = {"name": PRIME_RL_MODEL}
    layer.origins[("model",)] = layer.origins[("model", "name")] = replace(origin, path="", line=None)
    said = f"not set: PRIME-RL's own default, {PRIME_RL_MODEL}"
    layer.notices.append(Problem(origin.source, "model.name", said))


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
