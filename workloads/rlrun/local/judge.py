"""Validation of a run before it starts: its manifest, code, model and data, so that all problems are reported at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.api.run_manifest import ApplyDefaults, Variation, examine_manifest
from rlrun.config.loading.examine import Examined, examine_layer, find_place
from rlrun.config.loading.layers import Layer
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.data import DataConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AdvantageConfig
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.fit.report import quantization_notes, trained_models, why_untrainable
from rlrun.local.contradictions import find_contradictions
from rlrun.local.model_sizes import (
    allocation_notice,
    autoscale_notice,
    elastic_notice,
    kernel_notice,
    product_notices,
    size_findings,
    spot_notice,
)
from rlrun.local.proved_models import keep_proofs, list_proofs, unproved_notices
from rlrun.local.read_inputs import (
    check_data,
    check_engine_dtype,
    check_model_folder,
    check_model_weights,
    check_template_arguments,
    prompt_checks,
    template_checks,
)
from rlrun.local.user_code import Finding, check_user_code
from rlrun.runtime import exit_codes
from rlrun.tracking.backends.tracker_packages import missing_trackers, problems_in_cluster

GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "opo", "max_rl", "qae", "reinforce_pp_baseline"})
"""Advantages that compare a rollout with its group. In a group of one rollout they are 0."""
_UNREADABLE = EnvironmentConfig(id="unreadable")
_LOADED = ("id", "args", "python", "variables", "image", "start_timeout_seconds", "memory_gib")
_COLUMNS = ("messages_field", "prompt_field", "completion_field", "tools_field", "loss_roles", "malformed")
"""Fields of `data` that define the format of a row."""
_REFERENCE: Key = ("algorithm", "reference", "model")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
ModelT = TypeVar("ModelT", bound=RLRun | RLRunSpec)
LeaveOut = Callable[[RLRunSpec], Collection[Key]]


@dataclass(frozen=True)
class Judged(Generic[ModelT]):
    """A run's specification and its validation results."""

    run: ModelT | None
    """Parsed run, or None if it cannot be parsed."""
    problems: Sequence[Problem]
    """Reasons why the run cannot start, ordered by source and line."""
    notices: Sequence[Problem]
    """Facts that do not prevent the start."""
    code: int = exit_codes.CONFIGURATION
    """Exit code of a command that stops because of the problems."""


def omit_nothing(_spec: RLRunSpec) -> Collection[Key]:
    """Return an empty collection: the default of `leave_out`."""
    return ()


def judge_manifest(
    text: str,
    source: str,
    *,
    here: bool,
    leave_out: LeaveOut = omit_nothing,
    variation: Variation | None = None,
    defaults: ApplyDefaults | None = None,
) -> Judged[RLRun]:
    """Return all problems and notices of a manifest.

    Args:
        text: text of the manifest.
        source: name of the manifest in messages.
        here: whether the run will run on this machine, and not in pods that have other packages and files.
        leave_out: function that returns the fields of a specification, by Python names, whose models, code and data need no check.
        variation: options and variables that change the manifest.
        defaults: function that applies the manifest on top of defaults.

    Raises:
        KeyboardInterrupt: a signal arrived while users' code was loaded.
    """
    try:
        examined, layer = examine_manifest(text, source, variation, defaults)
    except ConfigError as error:
        return Judged(None, error.problems, ())
    return _judge_document(RLRun, examined, layer, below=("spec",), here=here, leave_out=leave_out)


def judge_layer(
    model: type[ModelT], layer: Layer, *, here: bool = True, leave_out: LeaveOut = omit_nothing
) -> Judged[ModelT]:
    """Return all problems and notices of a specification from files and a command line, as `judge_manifest`."""
    return _judge_document(model, examine_layer(model, layer), layer, below=(), here=here, leave_out=leave_out)


def report_and_stop(judged: Judged[ModelT]) -> int | None:
    """Print the notices and problems of a run. Returns the exit code if there are problems, or else None."""
    for notice in judged.notices:
        print(f"note: {notice}", file=sys.stderr)
    if not judged.problems and judged.run is not None:
        return None
    print(ConfigError(judged.problems), file=sys.stderr)
    return judged.code


def _judge_document(
    model: type[ModelT], examined: Examined[ModelT], layer: Layer, *, below: Key, here: bool, leave_out: LeaveOut
) -> Judged[ModelT]:
    """Validate a document. `below` is the position of the specification in it."""
    found: list[Finding] = []
    if examined.result is not None:
        spec: RLRunSpec = examined.result.spec if isinstance(examined.result, RLRun) else examined.result
        left_out: list[Key] = []
        if examined.problems:
            values: object = layer.values
            for name in below:
                values = values.get(name) if isinstance(values, dict) else None
            written = values if isinstance(values, dict) else {}
            replaced = [key[len(below) :] for key in examined.replaced if key[: len(below)] == below]
            spec, left_out = _as_written(spec, written), _left_out([key for key in replaced if key], written)
        name = examined.result.metadata.name if isinstance(examined.result, RLRun) else "my"
        found = find_problems(spec, here=here, left_out=[*left_out, *leave_out(spec)], name=name)
    reported = [(finding.notice, _make_problem(finding, model, layer, below)) for finding in found]
    problems = [*examined.problems, *(problem for notice, problem in reported if not notice)]
    return Judged(
        examined.result,
        sorted(problems, key=lambda problem: (problem.source, problem.line or 0)),
        [*layer.notices, *(problem for notice, problem in reported if notice)],
        _check_code(examined.problems, [finding for finding in found if not finding.notice]),
    )


def _check_code(problems: Sequence[Problem], found: Sequence[Finding]) -> int:
    if found and not problems and all(finding.key[0] in ("model", "data") for finding in found):
        return exit_codes.DATA
    if not found and all(problem.source == COMMAND_LINE for problem in problems):
        return exit_codes.USAGE
    return exit_codes.CONFIGURATION


def find_problems(spec: RLRunSpec, *, here: bool, left_out: Sequence[Key] = (), name: str = "my") -> list[Finding]:
    """Return findings about the models, code and data of a specification.

    Args:
        spec: specification of the run.
        here: same as for `judge_manifest`.
        left_out: fields that already have a problem, or that are not needed.
        name: name of the run.
    """
    # Each group of checks skips fields that an earlier check has rejected: first the model's folder, its kind, then its weights.
    models = trained_models(spec, left_out)
    found = [*check_model_folder(spec.model, here=here)]
    if (reference := models.get(_REFERENCE)) is not None:
        found += check_model_folder(reference, here=here, key=_REFERENCE)
    wrong = {finding.key for finding in found}
    reasons = {key: why_untrainable(model) for key, model in models.items() if key not in wrong}
    found += [Finding(key, why) for key, why in reasons.items() if why is not None]
    wrong = {finding.key for finding in found}
    for key, model in ((("model", "path"), spec.model), (_REFERENCE, reference)):
        if model is not None and key not in wrong:
            found += check_model_weights(model, key=key)
    found += [Finding(key, note, notice=True) for key, note in quantization_notes(models)]
    # Then the checks that load code: proofs of the models' architectures, prompts and templates, and the user's own code.
    made = list_proofs(models, {finding.key for finding in found}, seq_len=spec.seq_len)
    found += [] if here else unproved_notices(models)
    checks = [proof.check for proof in made]
    if not here:  # a run on this machine makes these checks itself after its start, which would otherwise be delayed
        wrong = {finding.key for finding in found}
        checks += [*prompt_checks(spec, wrong), *template_checks(spec, wrong)]
    found += check_user_code(
        spec.environments, spec.algorithm, spec.model.tiny, here=here, left_out=left_out, models=checks
    )
    keep_proofs(made, {*left_out, *(finding.key for finding in found)})
    # At last the checks that compare fields of the specification, which cost nothing.
    evaluation = spec.evaluation.sampling if spec.evaluation is not None else None
    if spec.task != "SFT":
        found += check_engine_dtype(spec.model, gpus=spec.inference.gpus_per_replica)
    found += check_template_arguments(spec.model, spec.environments, spec.sampling, evaluation)
    found += check_data(spec.data, here=here, left_out=left_out)
    found += find_contradictions(spec, name)
    found += allocation_notice(spec)
    found += autoscale_notice(spec)
    found += spot_notice(spec)
    found += elastic_notice(spec)
    found += _check_trackers(spec, here=here)
    found += _lonely_groups(spec)
    found += _narrow_bands(spec)
    found += [] if here else [*_proxies_elsewhere(spec), *kernel_notice(spec), *product_notices(spec)]
    found += size_findings(spec, {finding.key for finding in found if not finding.notice})
    return [finding for finding in found if not any(finding.key[: len(key)] == key for key in left_out)]


def _check_trackers(spec: RLRunSpec, *, here: bool) -> Iterator[Finding]:
    """Yield findings about trackers that cannot work on this machine, or notices about those of a cluster."""
    if spec.tracking is None:
        return
    block = spec.orchestrator
    variables = {variable.name: variable.value for variable in block.env}
    opaque = bool(block.env_from or block.pod_template)
    found = (
        missing_trackers(spec.tracking, os.environ)
        if here
        else problems_in_cluster(spec.tracking, variables, opaque=opaque)
    )
    for name, message in found:
        yield Finding(("tracking", name), message, notice=not here)


def _proxies_elsewhere(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield notices about proxies with an address in a Secret or ConfigMap: the operator cannot allow it in the run's network policy."""
    if spec.network_policy.mode == "None" or spec.network_policy.extra_egress:
        return
    for role in ("trainer", "inference", "orchestrator"):
        for i, variable in enumerate(getattr(spec, role).env):
            if variable.name.upper() in _PROXIES and variable.value_from is not None:
                yield Finding(
                    (role, "env", i),
                    f"has {variable.name} from another object, whose address the run's network policy cannot allow; set it as value, "
                    "or allow it in networkPolicy.extraEgress",
                    notice=True,
                )


def _lonely_groups(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield notices about groups of one rollout, from which a group baseline learns nothing."""
    for i, environment in enumerate(spec.environments if spec.task == "RL" else ()):
        advantage = _check_advantage(spec, environment)
        if environment.group_size == 1 and _compares_within_group(advantage):
            yield Finding(
                ("environments", i, "group_size"),
                f"is 1, and advantage {advantage.name} compares a rollout with its group: every advantage is 0, so nothing is "
                "learned here; raise groupSize or choose the advantage rloo, reward, reinforce_pp or gae",
                notice=True,
            )


def _narrow_bands(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield warnings about bands of losses that are narrower than rounding errors, each once."""
    if spec.task != "RL":
        return
    if (warning := spec.algorithm.band_warning) is not None:
        yield Finding(("algorithm", "proximal"), warning, notice=True)
    for i, environment in enumerate(spec.environments):
        try:
            own = environment.algorithm.merged_over(spec.algorithm).band_warning
        except ValueError:  # validation reports parts that do not fit together, and a field that is left out
            continue
        if own is not None and own != warning:
            yield Finding(("environments", i, "algorithm", "proximal"), own, notice=True)


def _compares_within_group(advantage: AdvantageConfig) -> bool:
    return advantage.name in GROUP_BASELINES and advantage.options.get("mean", "group") == "group"


def _check_advantage(spec: RLRunSpec, environment: EnvironmentConfig) -> AdvantageConfig:
    return environment.algorithm.advantage or spec.algorithm.effective_advantage


def _that_fits(environment: EnvironmentConfig, spec: RLRunSpec) -> EnvironmentConfig:
    """The environment, without an algorithm that does not fit the run's algorithm: validation reports it, and it cannot be resolved."""
    try:
        environment.algorithm.merged_over(spec.algorithm)
    except ValueError:
        return environment.model_copy(update={"algorithm": type(environment.algorithm)()})
    return environment


def _as_written(spec: RLRunSpec, written: Mapping[str, object]) -> RLRunSpec:
    """Return the specification with its environments, data and model folder as they were written, as far as each can be parsed."""
    changes: dict[str, object] = {}
    environments = written.get("environments")
    if (model := _model_folder(written)) is not None:
        changes["model"] = model
    items = environments if isinstance(environments, list) else ()
    changes["environments"] = [_that_fits(_check_environment(item).result or _UNREADABLE, spec) for item in items]
    changes["data"] = _check_data(written).result if "data" in written else None
    return spec.model_copy(update=changes)


def _model_folder(written: Mapping[str, object]) -> ModelConfig | None:
    """The model's folder as it was written, or None if there is no folder or its path is invalid."""
    model = written.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(path, str):
        return None
    values: dict[str, object] = {"path": path, "trust_remote_code": model.get("trust_remote_code") is True}
    if isinstance(own := model.get("class_"), str):
        values["class_"] = own
    examined = examine_layer(ModelConfig, Layer(values=values))
    return None if examined.problems else examined.result


def _check_data(written: Mapping[str, object]) -> Examined[DataConfig]:
    data = written.get("data")
    return examine_layer(DataConfig, Layer(values=data if isinstance(data, dict) else {}))


def _check_environment(item: object) -> Examined[EnvironmentConfig]:
    return examine_layer(EnvironmentConfig, Layer(values=item if isinstance(item, dict) else {}))


def _left_out(replaced: Collection[Key], written: Mapping[str, object]) -> list[Key]:
    """Return the checked parts of a specification that validation has replaced by defaults."""
    left_out: list[Key] = []
    if any(key[0] == "algorithm" for key in replaced):
        left_out += [("algorithm", "loss"), ("algorithm", "advantage"), ("algorithm", "reference")]
    left_out += [key[:1] for key in replaced if key[:2] == ("model", "tiny")]
    if any(key[0] == "model" for key in replaced) and _model_folder(written) is None:
        left_out.append(("model",))  # the specification contains a placeholder
    data = _check_data(written)
    left_out += [("data", *key) for key in data.replaced]
    if any(data.is_replaced((name,)) for name in _COLUMNS):
        left_out.append(("data",))
    environments = written.get("environments")
    for i, item in enumerate(environments if isinstance(environments, list) else ()):
        own = _check_environment(item)
        if own.result is None or any(own.is_replaced((name,)) for name in _LOADED):
            left_out.append(("environments", i))
        left_out += [("environments", i, *key) for key in own.replaced]
    return left_out


def _make_problem(finding: Finding, model: type[BaseModel], layer: Layer, below: Key) -> Problem:
    origin = find_place((*below, *finding.key), model, layer)
    return Problem(origin.source, origin.path, finding.message, origin.line)
