"""Mistakes of place and name in manifests: nesting, spelling, fields of other objects, apiVersion and kind."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import SPEC, Mistake, field_of_spec, text


def _unknown(what: str, line: str, place: str, fix: str, repair: tuple[str, str] | None) -> Mistake:
    return field_of_spec(what, line, f"spec.{place}", "", fix, repair)


def _head(what: str, old: str, new: str, place: str, value: str, fix: str) -> Mistake:
    return text(what, SPEC.replace(old, new), place, value, fix, (new, fix))


_NESTING = (
    text(
        "fields that are not indented below spec",
        SPEC.replace("\n  ", "\n"),
        "spec",
        "maxSteps",
        "indent model, maxSteps, seqLen and environments by two spaces below spec",
    ),
    text("no spec", SPEC.replace("spec:\n", "").replace("\n  ", "\n"), "spec", "maxSteps", "write spec: above model"),
    text(
        "spec in spec",
        SPEC.replace("spec:\n", "spec:\n spec:\n"),
        "spec.spec",
        "",
        "remove the inner spec",
        (" spec:\n", ""),
    ),
    text(
        "spec below metadata",
        SPEC.replace("metadata: {name: quick}\nspec:\n", "metadata:\n name: quick\n spec:\n"),
        "metadata.spec",
        "",
        "spec belongs at the top of the manifest",
        (" spec:\n", "spec:\n"),
    ),
    text(
        "a name at the top",
        SPEC.replace("metadata: {name: quick}", "name: quick"),
        "name",
        "",
        "metadata: {name: quick}",
        ("name: quick", "metadata: {name: quick}"),
    ),
    text("no name", SPEC.replace("{name: quick}", "{}"), "metadata.name", "", "write name: my-run"),
    text("no metadata", SPEC.replace("metadata: {name: quick}\n", ""), "metadata", "", "metadata: {name: my-run}"),
    text("no model", SPEC.replace("  model: {tiny: {}}\n", ""), "spec.model", "", "model: {name: Qwen/Qwen3-8B}"),
    text("no environment", SPEC.rpartition("  environments")[0], "environments", "is empty", "needs at least one"),
    _unknown(
        "a batch outside the orchestrator",
        "batchSize: 64",
        "batchSize",
        "orchestrator: {batchSize: 64}",
        ("batchSize: 64", "orchestrator: {batchSize: 64}"),
    ),
    _unknown(
        "a rate outside the optimizer",
        "trainer: {lr: 1e-4}",
        "trainer.lr",
        "optimizer: {lr: 0.0001}",
        ("lr: 1e-4", "optimizer: {lr: 0.0001}"),
    ),
    _unknown(
        "a rate outside the trainer",
        "lr: 1e-4",
        "lr",
        "trainer: {optimizer: {lr: 0.0001}}",
        ("lr: 1e-4", "trainer: {optimizer: {lr: 0.0001}}"),
    ),
    _unknown(
        "a temperature outside sampling",
        "temperature: 0.7",
        "temperature",
        "sampling: {temperature: 0.7}",
        ("temperature: 0.7", "sampling: {temperature: 0.7}"),
    ),
    _unknown(
        "a preset outside the algorithm",
        "preset: grpo",
        "preset",
        "algorithm: {preset: grpo}",
        ("preset: grpo", "algorithm: {preset: grpo}"),
    ),
    _unknown(
        "adapters outside the trainer",
        "lora: {rank: 8}",
        "lora",
        "trainer: {lora: {rank: 8}}",
        ("lora: {rank: 8}", "trainer: {lora: {rank: 8}}"),
    ),
    _unknown(
        "a batch below the trainer",
        "trainer: {batchSize: 64}",
        "trainer.batchSize",
        "spec.orchestrator.batchSize",
        ("trainer: {batchSize: 64}", "orchestrator: {batchSize: 64}"),
    ),
    _unknown(
        "an optimizer below the orchestrator",
        "orchestrator: {optimizer: {lr: 1e-4}}",
        "orchestrator.optimizer",
        "spec.trainer.optimizer",
        ("orchestrator: {", "trainer: {"),
    ),
    _unknown("a step count below the trainer", "trainer: {maxSteps: 10}", "trainer.maxSteps", "spec.maxSteps", None),
    _unknown(
        "a group size below sampling",
        "sampling: {groupSize: 8}",
        "sampling.groupSize",
        "spec.environments[].groupSize",
        None,
    ),
    _unknown(
        "an argument outside args",
        "environments: [{id: reverse-text, length: 5}]",
        "environments[0].length",
        "args: {length: 5}",
        ("length: 5", "args: {length: 5}"),
    ),
    _unknown(
        "GPUs of vLLM's name",
        "inference: {tensorParallelSize: 1}",
        "inference.tensorParallelSize",
        "did you mean tensorParallel",
        ("tensorParallelSize", "tensorParallel"),
    ),
    _unknown(
        "a Secret outside valueFrom",
        "trainer: {env: [{name: HF_TOKEN, secretKeyRef: {name: hub, key: token}}]}",
        "trainer.env[0].secretKeyRef",
        "valueFrom: {secretKeyRef: {name: hub, key: token}}",
        ("secretKeyRef: {name: hub, key: token}", "valueFrom: {secretKeyRef: {name: hub, key: token}}"),
    ),
    _unknown(
        "requests outside resources",
        "trainer: {limits: {memory: 16Gi}}",
        "trainer.limits",
        "resources: {limits: {memory: 16Gi}}",
        ("limits: {memory: 16Gi}", "resources: {limits: {memory: 16Gi}}"),
    ),
    _unknown(
        "memory outside limits",
        "trainer: {resources: {memory: 16Gi}}",
        "trainer.resources.memory",
        "limits: {memory: 16Gi}",
        ("memory: 16Gi", "limits: {memory: 16Gi}"),
    ),
)

_NAMES = (
    _unknown("a singular", "environment: []", "environment", "did you mean environments", None),
    _unknown("a plural", "trainers: {}", "trainers", "did you mean trainer", ("trainers", "trainer")),
    _unknown("underscores", "queue_name: a", "queue_name", "did you mean queueName", ("queue_name", "queueName")),
    _unknown("dashes", "queue-name: a", "queue-name", "did you mean queueName", ("queue-name", "queueName")),
    _unknown("capitals", "QueueName: a", "QueueName", "did you mean queueName", ("QueueName", "queueName")),
    _unknown("all capitals", "SUSPEND: false", "SUSPEND", "did you mean suspend", ("SUSPEND", "suspend")),
    _unknown(
        "a typo in a block",
        "trainer: {optimiser: {lr: 1e-4}}",
        "trainer.optimiser",
        "did you mean optimizer",
        ("optimiser", "optimizer"),
    ),
    _unknown(
        "a long form of a rate",
        "trainer: {optimizer: {learningRate: 1e-4}}",
        "trainer.optimizer.learningRate",
        "did you mean lr",
        ("learningRate", "lr"),
    ),
    _unknown("another word for steps", "trainingSteps: 10", "trainingSteps", "did you mean maxSteps", None),
    _unknown(
        "another word for GPUs",
        "trainer: {gpus: 0}",
        "trainer.gpus",
        "did you mean gpusPerReplica",
        ("gpus", "gpusPerReplica"),
    ),
    _unknown("another word for a length", "maxSeqLen: 512", "maxSeqLen", "did you mean seqLen", None),
    _unknown(
        "a field of the status",
        "phase: Running",
        "phase",
        "the operator writes status; remove phase",
        ("phase: Running", ""),
    ),
    _unknown(
        "conditions of the status",
        "conditions: []",
        "conditions",
        "the operator writes status; remove conditions",
        ("conditions: []", ""),
    ),
    _unknown("a field of a Deployment", "template: {}", "template", "podTemplate", ("template: {}", "")),
    _unknown(
        "containers",
        "trainer: {containers: []}",
        "trainer.containers",
        "podTemplate: {spec: {containers: ",
        ("containers: []", "podTemplate: {spec: {containers: []}}"),
    ),
    _unknown(
        "volumes",
        "trainer: {volumes: []}",
        "trainer.volumes",
        "podTemplate: {spec: {volumes: ",
        ("volumes: []", "podTemplate: {spec: {volumes: []}}"),
    ),
    _unknown(
        "a Job's field",
        "backoffLimit: 3",
        "backoffLimit",
        "failurePolicy: {maxRestarts: 3}",
        ("backoffLimit: 3", "failurePolicy: {maxRestarts: 3}"),
    ),
    _unknown(
        "replicas at the top", "replicas: 1", "replicas", "spec.trainer.replicas or spec.inference.replicas", None
    ),
    _unknown("an image at the top", "image: a:1", "image", "spec.trainer.image or spec.inference.image", None),
    _unknown("a label at the top", "labels: {a: b}", "labels", "metadata.labels", None),
)

_HEADS = (
    _head("a kind in small letters", "kind: RLRun", "kind: rlrun", "kind", "rlrun", "kind: RLRun"),
    _head("a plural kind", "kind: RLRun", "kind: RLRuns", "kind", "RLRuns", "kind: RLRun"),
    _head(
        "another version",
        "rlrun.io/v1alpha1",
        "rlrun.io/v1",
        "apiVersion",
        "rlrun.io/v1",
        "apiVersion: rlrun.io/v1alpha1"[12:],
    ),
    _head(
        "a version without its group",
        "apiVersion: rlrun.io/v1alpha1",
        "apiVersion: v1alpha1",
        "apiVersion",
        "v1alpha1",
        "apiVersion: rlrun.io/v1alpha1",
    ),
    _head(
        "a group without its version",
        "apiVersion: rlrun.io/v1alpha1",
        "apiVersion: rlrun.io",
        "apiVersion",
        "rlrun.io",
        "apiVersion: rlrun.io/v1alpha1",
    ),
    _head(
        "a version in capitals",
        "apiVersion: rlrun.io/v1alpha1",
        "apiVersion: rlrun.io/V1Alpha1",
        "apiVersion",
        "V1Alpha1",
        "apiVersion: rlrun.io/v1alpha1",
    ),
    text(
        "a typo in apiVersion",
        SPEC.replace("apiVersion", "apiversion"),
        "apiversion",
        "",
        "did you mean apiVersion",
        ("apiversion", "apiVersion"),
    ),
    text("a typo in kind", SPEC.replace("kind", "Kind"), "Kind", "", "did you mean kind", ("Kind", "kind")),
    text("a typo in spec", SPEC.replace("spec:", "specs:"), "specs", "", "did you mean spec", ("specs", "spec")),
    text(
        "a typo in metadata",
        SPEC.replace("metadata", "meta"),
        "meta",
        "",
        "did you mean metadata",
        ("meta", "metadata"),
    ),
    text("a list of runs", "apiVersion: v1\nkind: List\nitems: []\n", "kind", "List", "RLRun"),
    text(
        "a ConfigMap", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {}\n", "kind", "ConfigMap", "RLRun"
    ),
    text(
        "values of a chart",
        "operatorName: a\nimage: {repository: r}\n",
        "apiVersion",
        "",
        "apiVersion: rlrun.io/v1alpha1",
    ),
)


PLACES: Sequence[Mistake] = (*_NESTING, *_NAMES, *_HEADS)
