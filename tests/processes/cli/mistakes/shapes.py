"""Mistakes of shape in manifests: lists for mappings and the reverse, and short forms of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import CHATS, SFT, Mistake, field_of_spec, text
from tests.processes.cli.mistakes.mistake import SPEC as _SPEC

_ROWS = {"chats.jsonl": CHATS}
_WHOLE_LIST = "environments: [{id: reverse-text, args: {length: 5}}]"


def _shape(what: str, line: str, place: str, value: str, fix: str, repair: tuple[str, str] | None = None) -> Mistake:
    return field_of_spec(what, line, f"spec.{place}", value, fix, repair)


def _data(what: str, line: str, place: str, value: str, fix: str, repair: tuple[str, str] | None = None) -> Mistake:
    return field_of_spec(what, line, f"spec.{place}", value, fix, repair, base=SFT, files=_ROWS)


_LISTS = (
    _shape(
        "a mapping for the list of environments",
        "environments: {id: reverse-text, args: {length: 5}}",
        "environments",
        "a mapping",
        _WHOLE_LIST,
    ),
    _shape(
        "environments as a name",
        "environments: reverse-text",
        "environments",
        '"reverse-text"',
        "environments: [{id: reverse-text}]",
    ),
    _shape(
        "a list of names for environments",
        "environments: [reverse-text]",
        "environments[0]",
        '"reverse-text"',
        "{id: reverse-text}",
        ("reverse-text", "{id: reverse-text}"),
    ),
    _shape(
        "environments by name",
        "environments: {reverse-text: {groupSize: 8}}",
        "environments",
        "a mapping",
        "environments: [{id: reverse-text, groupSize: 8}]",
    ),
    _shape(
        "environments by name without anything",
        "environments: {reverse-text: }",
        "environments",
        "a mapping",
        "environments: [{id: reverse-text}]",
    ),
    _shape(
        "engine arguments as one text",
        "inference: {extraArgs: --enable-prefix-caching}",
        "inference.extraArgs",
        '"--enable-prefix-caching"',
        "extraArgs: [--enable-prefix-caching]",
        ("extraArgs: --enable-prefix-caching", "extraArgs: [--enable-prefix-caching]"),
    ),
    _shape(
        "engine arguments as a mapping",
        "inference: {extraArgs: {block-size: 16}}",
        "inference.extraArgs",
        "a mapping",
        "extraArgs: [--block-size=16]",
        ("extraArgs: {block-size: 16}", "extraArgs: [--block-size=16]"),
    ),
    _shape(
        "variables as a mapping",
        "trainer: {env: {OMP_NUM_THREADS: 4}}",
        "trainer.env",
        "a mapping",
        "env: [{name: OMP_NUM_THREADS, value: '4'}]",
        ("env: {OMP_NUM_THREADS: 4}", "env: [{name: OMP_NUM_THREADS, value: '4'}]"),
    ),
    _shape(
        "variables as assignments",
        "trainer: {env: [NCCL_DEBUG=INFO]}",
        "trainer.env[0]",
        '"NCCL_DEBUG=INFO"',
        "{name: NCCL_DEBUG, value: INFO}",
        ("NCCL_DEBUG=INFO", "{name: NCCL_DEBUG, value: INFO}"),
    ),
    _shape(
        "a variable by its name",
        "trainer: {env: [{NCCL_DEBUG: INFO}]}",
        "trainer.env[0]",
        "NCCL_DEBUG",
        "{name: NCCL_DEBUG, value: INFO}",
        ("{NCCL_DEBUG: INFO}", "{name: NCCL_DEBUG, value: INFO}"),
    ),
    _shape(
        "a Secret of variables outside a list",
        "trainer: {envFrom: {secretRef: {name: keys}}}",
        "trainer.envFrom",
        "a mapping",
        "envFrom: [{secretRef: {name: keys}}]",
        ("envFrom: {secretRef: {name: keys}}", "envFrom: [{secretRef: {name: keys}}]"),
    ),
    _shape(
        "one toleration outside a list",
        "trainer: {tolerations: {key: gpu, operator: Exists}}",
        "trainer.tolerations",
        "a mapping",
        "tolerations: [{key: gpu, operator: Exists}]",
        ("tolerations: {key: gpu, operator: Exists}", "tolerations: [{key: gpu, operator: Exists}]"),
    ),
    _shape(
        "pull secrets by name",
        "trainer: {imagePullSecrets: [registry]}",
        "trainer.imagePullSecrets[0]",
        '"registry"',
        "{name: registry}",
        ("registry", "{name: registry}"),
    ),
    _shape(
        "access modes as a text",
        "storage: {claimTemplate: {accessModes: ReadWriteMany}}",
        "storage.claimTemplate.accessModes",
        '"ReadWriteMany"',
        "accessModes: [ReadWriteMany]",
        ("accessModes: ReadWriteMany", "accessModes: [ReadWriteMany]"),
    ),
    _shape(
        "a stop word outside a list",
        "sampling: {stop: END}",
        "sampling.stop",
        '"END"',
        "stop: [END]",
        ("stop: END", "stop: [END]"),
    ),
    _data("data as a path", "data: chats.jsonl", "data", '"chats.jsonl"', "data: {sources: [{path: chats.jsonl}]}"),
    _data(
        "a source as a path",
        "data: {sources: chats.jsonl}",
        "data.sources",
        '"chats.jsonl"',
        "sources: [{path: chats.jsonl}]",
        ("sources: chats.jsonl", "sources: [{path: chats.jsonl}]"),
    ),
    _data(
        "one source outside a list",
        "data: {sources: {path: chats.jsonl}}",
        "data.sources",
        "a mapping",
        "sources: [{path: chats.jsonl}]",
        ("sources: {path: chats.jsonl}", "sources: [{path: chats.jsonl}]"),
    ),
    _data(
        "a list of sources as paths",
        "data: {sources: [chats.jsonl]}",
        "data.sources[0]",
        '"chats.jsonl"',
        "{path: chats.jsonl}",
        ("chats.jsonl", "{path: chats.jsonl}"),
    ),
)

_BLOCKS = (
    _shape("a model by name", "model: org/name", "model", '"org/name"', "model: {name: org/name}"),
    _shape("a model by folder", "model: /data/models/q", "model", '"/data/models/q"', "model: {path: /data/models/q}"),
    _shape("a tiny model by name", "model: tiny", "model", '"tiny"', "model: {tiny: {}}"),
    _shape("a model in a list", "model: [{tiny: {}}]", "model", "a list", "model: {tiny: {}}"),
    _shape(
        "a tiny model switched on", "model: {tiny: true}", "model.tiny", "true", "tiny: {}", ("tiny: true", "tiny: {}")
    ),
    _shape("a tiny model left empty", "model: {tiny: }", "model", "none of them", "tiny: {}", ("tiny: ", "tiny: {}")),
    _shape("an algorithm by name", "algorithm: grpo", "algorithm", '"grpo"', "algorithm: {preset: grpo}"),
    _shape(
        "a loss by name",
        "algorithm: {loss: ppo}",
        "algorithm.loss",
        '"ppo"',
        "loss: {name: ppo}",
        ("loss: ppo", "loss: {name: ppo}"),
    ),
    _shape(
        "an optimizer by name",
        "trainer: {optimizer: adamw}",
        "trainer.optimizer",
        '"adamw"',
        "optimizer: {name: adamw}",
        ("optimizer: adamw", "optimizer: {name: adamw}"),
    ),
    _shape(
        "adapters switched on", "trainer: {lora: true}", "trainer.lora", "true", "lora: {}", ("lora: true", "lora: {}")
    ),
    _shape(
        "adapters by rank",
        "trainer: {lora: 16}",
        "trainer.lora",
        "16",
        "lora: {rank: 16}",
        ("lora: 16", "lora: {rank: 16}"),
    ),
    _shape("an evaluation switched on", "evaluation: true", "evaluation", "true", "evaluation: {}"),
    _shape("an evaluation switched off", "evaluation: false", "evaluation", "false", "evaluation: null"),
    _shape("an evaluation by its interval", "evaluation: 5", "evaluation", "5", "evaluation: {interval: 5}"),
    _shape("a checkpoint by its interval", "checkpoint: 5", "checkpoint", "5", "checkpoint: {interval: 5}"),
    _shape("a checkpoint switched off", "checkpoint: false", "checkpoint", "false", "checkpoint: {enabled: false}"),
    _shape("a tracker by name", "tracking: wandb", "tracking", '"wandb"', "tracking: {wandb: {}}"),
    _shape(
        "trackers as a list",
        "tracking: [wandb, tensorboard]",
        "tracking",
        "a list",
        "tracking: {wandb: {}, tensorboard: {}}",
    ),
    _shape("storage by size", "storage: 50Gi", "storage", '"50Gi"', "storage: {claimTemplate: {size: 50Gi}}"),
    _shape(
        "node labels as assignments",
        "trainer: {nodeSelector: [pool=gpu]}",
        "trainer.nodeSelector",
        "a list",
        "nodeSelector: {pool: gpu}",
        ("nodeSelector: [pool=gpu]", "nodeSelector: {pool: gpu}"),
    ),
    _shape(
        "a node label as a text",
        "trainer: {nodeSelector: pool=gpu}",
        "trainer.nodeSelector",
        '"pool=gpu"',
        "nodeSelector: {pool: gpu}",
        ("nodeSelector: pool=gpu", "nodeSelector: {pool: gpu}"),
    ),
    _shape(
        "limits as a list",
        "trainer: {resources: {limits: [{memory: 16Gi}, {cpu: 4}]}}",
        "trainer.resources.limits",
        "a list",
        "limits: {memory: 16Gi, cpu: 4}",
        ("limits: [{memory: 16Gi}, {cpu: 4}]", "limits: {memory: 16Gi, cpu: 4}"),
    ),
    _shape(
        "arguments of an environment as a list",
        "environments: [{id: reverse-text, args: [{length: 5}]}]",
        "environments[0].args",
        "a list",
        "args: {length: 5}",
        ("args: [{length: 5}]", "args: {length: 5}"),
    ),
    _shape(
        "a Secret's key as a text",
        "trainer: {env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: hub}}]}",
        "trainer.env[0].valueFrom.secretKeyRef",
        '"hub"',
        "secretKeyRef: {name: hub, key: HF_TOKEN}",
        ("secretKeyRef: hub", "secretKeyRef: {name: hub, key: HF_TOKEN}"),
    ),
    _shape(
        "exit codes as one number",
        "failurePolicy: {rules: [{name: full, action: FailRun, onExitCodes: 28}]}",
        "failurePolicy.rules[0].onExitCodes",
        "28",
        "onExitCodes: [28]",
        ("onExitCodes: 28", "onExitCodes: [28]"),
    ),
    text(
        "metadata as a name",
        _SPEC.replace("metadata: {name: quick}", "metadata: quick"),
        "metadata",
        '"quick"',
        "metadata: {name: quick}",
        ("metadata: quick", "metadata: {name: quick}"),
    ),
    text(
        "labels as a list",
        _SPEC.replace("{name: quick}", "{name: quick, labels: [team=a]}"),
        "metadata.labels",
        "a list",
        "labels: {team: a}",
        ("labels: [team=a]", "labels: {team: a}"),
    ),
    text(
        "spec as a list",
        _SPEC.replace("\n  ", "\n- "),
        "spec",
        "a list",
        "spec: {model: {tiny: {}}, maxSteps: 10",
    ),
)

SHAPES: Sequence[Mistake] = (*_LISTS, *_BLOCKS)
