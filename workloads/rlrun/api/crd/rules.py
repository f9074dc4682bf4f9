"""Rules between fields, as the API server checks them (CEL, in `policy`): the same as the models' validators, in the same words.

A model that has a validator has its rules here, and both judge the same malformed manifests in the tests. The API server's are there so
that `kubectl apply` refuses at once, the models' so that a run on one machine is judged alike and that nothing slips past an old CRD.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from rlrun.api.crd.frozen import frozen_rules
from rlrun.api.kubernetes import (
    RESERVED_ENV,
    RESERVED_ENV_PREFIX,
    EnvFromSource,
    EnvVar,
    EnvVarSource,
    ResourceRequirements,
    Toleration,
)
from rlrun.api.lifecycle import BackoffSpec, FailurePolicySpec, FailureRule
from rlrun.api.placement import TopologySpec
from rlrun.api.pods import InferenceBlock, TrainerBlock
from rlrun.api.resource import NAME_MAX, RLRun, RLRunSpec
from rlrun.api.storage import RESERVED_PATHS, StorageSpec
from rlrun.config.algorithm.names import ADVANTAGE_ENTRIES, DEFAULT_PRESET, LOSS_ENTRIES, PRESETS
from rlrun.config.models.checkpoint import ResumeConfig
from rlrun.config.models.companions import ReferenceConfig
from rlrun.config.models.data import DataConfig, SourceConfig, ValidationConfig
from rlrun.config.models.engine_arguments import OWNED_FLAGS, OWNED_SHORT
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.learning import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    LossConfig,
    OptimizerConfig,
)
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.rollout import CurriculumConfig, EnvironmentConfig
from rlrun.config.rule import Rule, quoted


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(quoted(name) for name in names)}]"


_IMPORT_PATH = r"^[A-Za-z_]\\w*([.][A-Za-z_]\\w*)*:[A-Za-z_]\\w*$"


def _known(kind: str, names: Iterable[str]) -> Rule:
    known = sorted(names)
    return Rule(
        f"self.name in {_listed(known)} || self.name.matches('{_IMPORT_PATH}')",
        f"unknown {kind} '{{self.name}}'; known: {', '.join(known)}, or an import path package.module:function",
        ".name",
    )


_LABEL = "(has({0}.name) ? {0}.name : {0}.id)"
_FIRST_UNEVEN = "self.environments.map(e, self.orchestrator.batchSize % e.groupSize != 0, e.groupSize)[0]"
_TOO_LONG = "self.environments.map(e, has(e.sampling) && e.sampling.maxTokens >= self.seqLen)"
_TOO_LONG_TOKENS = (
    "self.environments.map(e, has(e.sampling) && e.sampling.maxTokens >= self.seqLen, e.sampling.maxTokens)[0]"
)

_SPEC = (
    Rule(
        "!self.placement.colocate || self.algorithm.maxAsyncLevel == 0",
        "algorithm.maxAsyncLevel ({self.algorithm.maxAsyncLevel}) must be 0 with placement.colocate: engines sleep while a step is "
        "trained; set maxAsyncLevel: 0",
        ".algorithm.maxAsyncLevel",
    ),
    Rule(
        "self.weightSync.transport == 'Filesystem' || !has(self.trainer.lora)",
        "weightSync.transport (NCCL) does not send adapters; set transport: Filesystem or remove trainer.lora",
        ".weightSync",
    ),
    Rule(
        "self.weightSync.transport == 'Filesystem' || (self.trainer.gpusPerReplica == 0) == (self.inference.gpusPerReplica == 0)",
        "weightSync.transport (NCCL) connects GPUs with GPUs, or CPUs with CPUs; trainer.gpusPerReplica is "
        "{self.trainer.gpusPerReplica} and inference.gpusPerReplica is {self.inference.gpusPerReplica}; "
        "set transport: Filesystem or change one of them",
        ".weightSync",
    ),
    Rule(
        "self.task == 'SFT' || !has(self.data)",
        "data is for task SFT; remove it or set task to SFT",
        ".data",
    ),
    Rule(
        "self.task == 'SFT' || self.environments.size() > 0",
        "environments is empty; task {self.task} needs one",
        ".environments",
    ),
    Rule(
        "self.task != 'SFT' || has(self.data)",
        "data is not set; task SFT needs it",
        ".data",
    ),
    Rule(
        "self.task != 'SFT' || self.environments.size() == 0",
        "environments is for task RL; remove it",
        ".environments",
    ),
    Rule(
        "self.task != 'SFT' || !has(self.evaluation)",
        "evaluation is for task RL; remove it",
        ".evaluation",
    ),
    Rule(
        f"self.task != 'SFT' || self.algorithm.preset in {_listed((DEFAULT_PRESET, 'sft'))}",
        "algorithm.preset ({self.algorithm.preset}) is for task RL; remove it or set it to sft",
        ".algorithm.preset",
    ),
    Rule(
        "!(self.task in ['RL', 'SFT']) || !has(self.policies)",
        "policies is for a task without training, and task is {self.task}; remove it or set task to Eval",
        ".policies",
    ),
    Rule(
        "self.task != 'RL' || self.environments.all(e, self.orchestrator.batchSize % e.groupSize == 0)",
        "orchestrator.batchSize ({self.orchestrator.batchSize}) must be divisible by "
        "environments[{self.environments.map(e, self.orchestrator.batchSize % e.groupSize != 0).indexOf(true)}].groupSize "
        f"({{{_FIRST_UNEVEN}}}); set batchSize to {{(self.orchestrator.batchSize / {_FIRST_UNEVEN} + 1) * {_FIRST_UNEVEN}}}",
        ".orchestrator.batchSize",
    ),
    Rule(
        f"self.environments.all(e, self.environments.exists_one(f, {_LABEL.format('f')} == {_LABEL.format('e')}))",
        f"several environments are called '{{self.environments.map(e, {_LABEL.format('e')})"
        f".filter(l, !self.environments.exists_one(f, {_LABEL.format('f')} == l))[0]}}'; "
        "give each its own environments[].name",
        ".environments",
    ),
    Rule(
        "!has(self.inference.maxModelLen) || self.inference.maxModelLen >= self.seqLen",
        "inference.maxModelLen ({self.inference.maxModelLen}) must be at least seqLen ({self.seqLen}); "
        "raise maxModelLen or remove it",
        ".inference.maxModelLen",
    ),
    Rule(
        "!has(self.trainer.microBatchTokens) || self.trainer.microBatchTokens >= self.seqLen",
        "trainer.microBatchTokens ({self.trainer.microBatchTokens}) must be at least seqLen ({self.seqLen}): "
        "one sample must fit a micro-batch",
        ".trainer.microBatchTokens",
    ),
    Rule(
        "!has(self.model.tiny) || self.model.tiny.maxLength >= self.seqLen",
        "model.tiny.maxLength ({self.model.tiny.maxLength}) must be at least seqLen ({self.seqLen})",
        ".model.tiny.maxLength",
    ),
    Rule(
        "self.sampling.maxTokens < self.seqLen || self.environments.all(e, has(e.sampling))",
        "sampling.maxTokens ({self.sampling.maxTokens}) must be less than seqLen ({self.seqLen}), "
        "which holds the prompt too; lower maxTokens or raise seqLen",
        ".sampling.maxTokens",
    ),
    Rule(
        f"!{_TOO_LONG}.exists(long, long)",
        f"environments[{{{_TOO_LONG}.indexOf(true)}}].sampling.maxTokens "
        f"({{{_TOO_LONG_TOKENS}}}) must be less than seqLen "
        "({self.seqLen}), which holds the prompt too; lower maxTokens or raise seqLen",
        ".environments",
    ),
)

_REVISION = Rule(
    "!has(self.revision) || has(self.name)",
    "revision ({self.revision}) needs name: a local folder has no revisions; remove revision",
    ".revision",
)
_MODEL = (
    Rule(
        "[has(self.name), has(self.path), has(self.tiny)].filter(given, given).size() == 1",
        "exactly one of name, path and tiny says where the model comes from; got "
        "{!has(self.name) && !has(self.path) && !has(self.tiny) ? 'none of them' : "
        "has(self.name) && has(self.path) ? 'name and path' : has(self.name) ? 'name and tiny' : 'path and tiny'}",
    ),
    _REVISION,
)

_STORAGE = (
    Rule(
        "has(self.claimName) != has(self.claimTemplate)",
        "exactly one of claimName and claimTemplate says where the run's volume comes from; got "
        "{has(self.claimName) ? 'both' : 'neither'}",
    ),
    Rule(
        f"!{_listed(RESERVED_PATHS)}.exists(path, (self.mountPath + '/').startsWith(path + '/') || "
        "(path + '/').startsWith(self.mountPath + '/'))",
        "mountPath ({self.mountPath}) is, or holds, a folder of the image or of the pod; choose another such as /data",
        ".mountPath",
    ),
    Rule(
        "self.whenDeleted != 'Delete' || has(self.claimTemplate)",
        "whenDeleted (Delete) needs claimTemplate: a claim that the run did not make is never deleted; remove it",
        ".whenDeleted",
    ),
)

_PLACE = (
    _REVISION,
    Rule(
        "has(self.path) != has(self.name)",
        "exactly one of path and name says where the data is; got {has(self.path) ? 'both' : 'neither'}",
    ),
)

_RANKS = "(self.replicas * (has(self.processesPerReplica) ? self.processesPerReplica : self.gpusPerReplica > 0 ? self.gpusPerReplica : 1))"
_DIVIDED = "(self.parallelism.dpReplicate * self.parallelism.cp * self.parallelism.tp)"
_REPLICATED = "(self.parallelism.dpReplicate * self.parallelism.tp)"

_TRAINER = (
    Rule(
        f"!has(self.parallelism.dpShard) || {_DIVIDED} * self.parallelism.dpShard == {_RANKS}",
        f"parallelism: dpReplicate * dpShard * cp * tp ({{{_DIVIDED} * self.parallelism.dpShard}}) must be the number of ranks "
        f"({{{_RANKS}}} = replicas * processesPerReplica); change one of them, or remove dpShard",
        ".parallelism",
    ),
    Rule(
        f"has(self.parallelism.dpShard) || {_RANKS} % {_DIVIDED} == 0",
        f"parallelism: dpReplicate * cp * tp ({{{_DIVIDED}}}) must divide the number of ranks "
        f"({{{_RANKS}}} = replicas * processesPerReplica); lower one of them or raise replicas",
        ".parallelism",
    ),
    Rule(
        f"[{_RANKS}].all(ranks, ranks % {_DIVIDED} != 0 || ranks / {_REPLICATED} % self.parallelism.ep == 0)",
        f"parallelism.ep ({{self.parallelism.ep}}) must divide dpShard * cp ({{{_RANKS} / {_REPLICATED}}}); lower ep or raise dpShard",
        ".parallelism",
    ),
    Rule(
        "!self.cpuOffload || self.gpusPerReplica > 0",
        "cpuOffload (true) needs GPUs, and gpusPerReplica is 0; remove cpuOffload",
        ".cpuOffload",
    ),
    Rule(
        "self.attention != 'varlen' || self.gpusPerReplica > 0",
        "attention (varlen) needs GPUs, and gpusPerReplica is 0; set attention: auto",
        ".attention",
    ),
    Rule(
        "!has(self.lora) || self.parallelism.tp == 1 || self.lora.dropout == 0.0",
        "parallelism.tp ({self.parallelism.tp}) drops different inputs on each rank; set lora.dropout: 0 or tp: 1",
        ".parallelism",
    ),
    Rule(
        "!has(self.sharedWith) || has(self.lora)",
        "sharedWith ({self.sharedWith}) needs lora: runs share a trainer by their adapters; set lora",
        ".sharedWith",
    ),
    Rule(
        "!has(self.lora) || !has(self.lora.modulesToSave) || size(self.lora.modulesToSave) == 0 || "
        "(!has(self.sharedWith) && self.lora.slots == 1)",
        "lora.modulesToSave trains whole modules, which runs cannot share; remove it, or sharedWith and lora.slots",
        ".lora",
    ),
    Rule(
        "!has(self.sharedWith) || (self.replicas == 1 && !has(self.processesPerReplica) && self.gpusPerReplica == 0 && "
        "self.parallelism.dpReplicate == 1 && !has(self.parallelism.dpShard) && self.parallelism.tp == 1 && "
        "self.parallelism.cp == 1 && self.parallelism.ep == 1 && self.activationCheckpointing == 'none' && "
        "self.attention == 'auto' && !self.compile && self.computeDtype == 'auto' && !self.cpuOffload && "
        "self.gradientAccumulation == 'reduce' && "
        "(!has(self.lora) || self.lora.slots == 1))",
        "sharedWith ({self.sharedWith}) leaves processes, layout and memory to the host; remove lora.slots, replicas, "
        "processesPerReplica, gpusPerReplica, parallelism, activationCheckpointing, attention, compile, computeDtype, cpuOffload and "
        "gradientAccumulation",
        ".sharedWith",
    ),
    Rule(
        "!self.compile || !(self.activationCheckpointing in ['selective', 'attention'])",
        "compile (true) hides from activationCheckpointing ({self.activationCheckpointing}) what it selects; "
        "set activationCheckpointing: full or remove compile",
        ".compile",
    ),
)
_OWNED = (
    "i < self.extraArgs.size() && [self.extraArgs[i]].exists(a, a.startsWith('--') ? "
    "[a.split('=')[0].replace('_', '-').split('.')[0].replace('--no-', '--', 1)].exists(f, f.size() > 2 && "
    f"{_listed(OWNED_FLAGS)}.exists(o, o.startsWith(f))) : {_listed(OWNED_SHORT)}.exists(o, a.startsWith(o)))"
)
_FIRST_OWNED = f"variables.indices.filter(i, {_OWNED})[0]"
_VALUE_OF_FLAG = (
    "i >= self.extraArgs.size() || self.extraArgs[i].startsWith('-') || "
    "(i > 0 && !(self.extraArgs[i - 1].startsWith('--') && self.extraArgs[i - 1].contains('=')))"
)
_FIRST_STRAY = f"variables.indices.filter(i, !({_VALUE_OF_FLAG}))[0]"
_RULE_TWICE = "self.rules.filter(r, !self.rules.exists_one(o, o.name == r.name))"


def _amount(kind: str) -> str:
    return f"string(self.{kind}[k])"


_MORE = (
    f"has(self.limits) && k in self.limits && isQuantity({_amount('requests')}) && isQuantity({_amount('limits')}) && "
    f"quantity({_amount('requests')}).isGreaterThan(quantity({_amount('limits')}))"
)
_FIRST_MORE = f"self.requests.filter(k, {_MORE})[0]"
_GAE = "has(self.advantage) ? self.advantage.name == 'gae' : self.preset in " + _listed(
    name for name, preset in PRESETS.items() if preset.advantage == "gae"
)
_NOT_THERE = " model, which this run does not have; set algorithm."

RULES: Mapping[type[BaseModel], tuple[Rule, ...]] = {
    RLRunSpec: _SPEC,
    ModelConfig: _MODEL,
    AlgorithmConfig: (
        Rule(
            f"self.preset in {_listed(PRESETS)}",
            f"unknown preset '{{self.preset}}'; known: {', '.join(sorted(PRESETS))}",
            ".preset",
        ),
        Rule(
            "self.maxOffPolicySteps >= self.maxAsyncLevel",
            "maxOffPolicySteps ({self.maxOffPolicySteps}) must be at least maxAsyncLevel ({self.maxAsyncLevel}): "
            "otherwise the pipeline makes groups that may never be trained; raise maxOffPolicySteps or lower maxAsyncLevel",
            ".maxOffPolicySteps",
        ),
        Rule(
            f"!({_GAE}) || has(self.critic)",
            f"advantage gae needs a critic{_NOT_THERE}critic, or choose another preset or part",
            ".critic",
        ),
        Rule(
            f"!has(self.critic) || ({_GAE})",
            "critic is not used by advantage {has(self.advantage) ? self.advantage.name : 'of the preset'}; "
            "set advantage to gae or remove critic",
            ".critic",
        ),
        Rule(
            "self.regularizers.kl == 0.0 || has(self.reference)",
            f"regularizers.kl ({{self.regularizers.kl}}) needs a reference{_NOT_THERE}reference, or choose another preset or part",
            ".reference",
        ),
    ),
    ReferenceConfig: (
        Rule(
            "!has(self.revision) || !(self.model == 'initial' || self.model.startsWith('/'))",
            "revision ({self.revision}) needs a repository on the hub, model is {self.model}; remove revision",
            ".revision",
        ),
    ),
    EnvironmentAlgorithm: (
        Rule(
            "!has(self.advantage) || self.advantage.name != 'gae'",
            "advantage gae is of the whole run, its critic sees all environments; set algorithm.advantage",
            ".advantage",
        ),
    ),
    CorrectionConfig: (
        Rule(
            "self.action != 'clamp' || self.measure == 'ratio'",
            "correction: action clamp needs measure ratio, got {self.measure}: a divergence is no weight; use action mask",
            ".action",
        ),
    ),
    LossConfig: (_known("loss", LOSS_ENTRIES),),
    AdvantageConfig: (_known("advantage", ADVANTAGE_ENTRIES),),
    ResumeConfig: (
        Rule(
            "(self.policy == 'Step') == has(self.step)",
            "step ({has(self.step) ? string(self.step) : 'not set'}) is set if and only if policy is Step; "
            "policy is {self.policy}",
            ".step",
        ),
        Rule(
            "has(self.fromRun) || !has(self.fromStep)",
            "fromStep ({self.fromStep}) is a step of another run: set fromRun, or step with policy Step",
            ".fromStep",
        ),
        Rule(
            "!has(self.fromRun) || self.policy != 'Step'",
            "policy Step starts from this run's own checkpoint, fromRun from another run's: set one of them",
            ".fromRun",
        ),
    ),
    EnvironmentConfig: (
        Rule(
            "!has(self.volumePaths) || self.volumePaths.size() == 0 || has(self.image)",
            "volumePaths is for the container of image; set image or remove volumePaths",
            ".volumePaths",
        ),
    ),
    CurriculumConfig: (
        Rule(
            "!has(self.easy) || !has(self.hard) || self.hard.threshold < self.easy.threshold",
            "hard.threshold ({self.hard.threshold}) must be below easy.threshold ({self.easy.threshold}); lower it",
        ),
    ),
    SourceConfig: _PLACE,
    ValidationConfig: _PLACE,
    DataConfig: (
        Rule(
            "!has(self.stopping) || has(self.epochs)",
            "stopping ({self.stopping}) needs epochs; set epochs or remove stopping",
            ".stopping",
        ),
    ),
    OptimizerConfig: (
        Rule(
            "self.name != 'adamw' || !has(self.momentum)",
            "momentum ({self.momentum}) has no meaning for optimizer adamw; remove it",
            ".momentum",
        ),
        Rule(
            "self.name != 'sgd' || (self.beta1 == 0.9 && self.beta2 == 0.999 && self.eps == 1e-8)",
            "beta1, beta2 and eps have no meaning for optimizer sgd; remove them",
            ".name",
        ),
    ),
    StorageSpec: _STORAGE,
    TopologySpec: (
        Rule(
            "has(self.required) != has(self.preferred)",
            "exactly one of required ({has(self.required) ? self.required : 'not set'}) and preferred "
            "({has(self.preferred) ? self.preferred : 'not set'}) names the node label; set one of them",
        ),
    ),
    TrainerBlock: _TRAINER,
    InferenceBlock: (
        Rule(
            f"!has(self.extraArgs) || variables.indices.all(i, !({_OWNED}))",
            f"extraArgs[{{{_FIRST_OWNED}}}] ({{self.extraArgs[{_FIRST_OWNED}]}}) is set by RLRun itself; remove it, "
            "and use the field of its own where there is one",
        ),
        Rule(
            f"!has(self.extraArgs) || variables.indices.all(i, {_VALUE_OF_FLAG})",
            f"extraArgs[{{{_FIRST_STRAY}}}] ({{self.extraArgs[{_FIRST_STRAY}]}}) is neither a flag nor the value of one; "
            f"write --{{self.extraArgs[{_FIRST_STRAY}]}}, or put it behind its flag",
        ),
        Rule(
            "self.minAvailable <= self.replicas",
            "minAvailable ({self.minAvailable}) must be at most replicas ({self.replicas}); lower it or raise replicas",
            ".minAvailable",
        ),
        Rule(
            "self.gpusPerReplica == 0 || self.gpusPerReplica == self.tensorParallel * self.dataParallel",
            "gpusPerReplica ({self.gpusPerReplica}) must be tensorParallel x dataParallel "
            "({self.tensorParallel * self.dataParallel}), or 0 for CPUs",
            ".gpusPerReplica",
        ),
    ),
    BackoffSpec: (
        Rule(
            "self.initialSeconds <= self.maxSeconds",
            "initialSeconds ({self.initialSeconds}) must be at most maxSeconds ({self.maxSeconds}); "
            "lower it or raise maxSeconds",
            ".initialSeconds",
        ),
    ),
    FailureRule: (
        Rule(
            "has(self.onExitCodes) || has(self.onReasons) || has(self.roles)",
            "rule {self.name} has no condition; set onExitCodes, onReasons or roles, or all three roles to mean every failure",
        ),
    ),
    FailurePolicySpec: (
        Rule(
            f"!has(self.rules) || {_RULE_TWICE}.size() == 0",
            f"several rules are called {{{_RULE_TWICE}[0].name}}; give each its own rules[].name",
            ".rules",
        ),
    ),
    ResourceRequirements: (
        Rule(
            f"!has(self.requests) || !self.requests.exists(k, {_MORE})",
            f"requests.{{{_FIRST_MORE}}} ({{string(self.requests[{_FIRST_MORE}])}}) is more than "
            f"limits.{{{_FIRST_MORE}}} ({{string(self.limits[{_FIRST_MORE}])}}); lower it or raise the limit",
        ),
    ),
    Toleration: (
        Rule(
            "!has(self.operator) || self.operator != 'Exists' || self.?value.orValue('') == ''",
            "value ({self.value}) has no meaning with operator Exists; remove it, or set operator: Equal",
            ".value",
        ),
        Rule(
            "has(self.key) || self.?operator.orValue('') == 'Exists'",
            "key is not set, which tolerates every taint and needs operator: Exists; set key or operator",
        ),
        Rule(
            "!has(self.tolerationSeconds) || self.?effect.orValue('') == 'NoExecute'",
            "tolerationSeconds ({self.tolerationSeconds}) needs effect NoExecute; set effect: NoExecute or remove it",
            ".tolerationSeconds",
        ),
    ),
    EnvVarSource: (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(given, given)",
            "exactly one of secretKeyRef, configMapKeyRef and fieldRef is the source of a variable; got "
            "{[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(given, given).size()}",
        ),
    ),
    EnvFromSource: (
        Rule(
            "has(self.secretRef) != has(self.configMapRef)",
            "exactly one of secretRef and configMapRef names the source of variables; got {has(self.secretRef) ? 'both' : 'neither'}",
        ),
    ),
    EnvVar: (
        Rule(
            "self.?value.orValue('') == '' || !has(self.valueFrom)",
            "{self.name} has a value and valueFrom; remove one of them",
        ),
        Rule(
            r"!has(self.value) || !self.value.contains('\x00')",
            "the value of {self.name} holds a NUL character, which no environment variable can; remove it",
            ".value",
        ),
        Rule(
            f"!(self.name in {_listed(RESERVED_ENV)}) && !self.name.startsWith('{RESERVED_ENV_PREFIX}')",
            "name ({self.name}) is reserved: RLRun sets it itself; remove it",
            ".name",
        ),
    ),
}
"""The rules of each model, in the order in which the CRD has them."""

NAME_RULE = Rule(
    f"self.metadata.name.size() <= {NAME_MAX} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "metadata.name '{self.metadata.name}' has {self.metadata.name.size()} characters; it must be an RFC 1035 label of at most "
    f"{NAME_MAX}, so that the names of its pods fit: lower-case letters, digits and '-', starting with a letter",
)
"""Of the whole resource: only there can CEL see the name. In Python `check_name` says it."""


_NAME = "self.metadata.name"
_OWN_FOLDER = "self.spec.?storage.?mountPath.orValue('/data') + '/' + self.metadata.name"


def _another_run(path: str) -> Rule:
    """A field names another run than its own."""
    value, parts = f"self.spec.{path}", path.split(".")
    there = " && ".join(f"has(self.spec.{'.'.join(parts[: i + 1])})" for i in range(len(parts)))
    same = " || ".join(f"{value} == {own}" for own in (_NAME, f"{_NAME} + '/'", _OWN_FOLDER, f"{_OWN_FOLDER} + '/'"))
    return Rule(
        f"!({there} && ({same}))",
        f"spec.{path} ({{{value}}}) is this run itself; name another one, or remove it",
        f".spec.{path}",
    )


_OTHER_RUNS = tuple(
    _another_run(path) for path in ("trainer.sharedWith", "checkpoint.resume.fromRun", "policies.fromRun")
)

ROOT_RULES: Mapping[type[BaseModel], tuple[Rule, ...]] = {RLRun: (NAME_RULE, *_OTHER_RUNS)}
"""Rules of the whole resource."""
TRANSITION_RULES = tuple(frozen_rules())
"""Rules of a change, over `self` and `oldSelf`, the whole resources."""
