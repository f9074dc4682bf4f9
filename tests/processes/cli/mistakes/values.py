"""Mistakes in single values of manifests: types, units, letters' case and ranges."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import Mistake, field_of_spec


def _value(what: str, line: str, place: str, value: str, fix: str, repair: tuple[str, str] | None = None) -> Mistake:
    return field_of_spec(what, line, f"spec.{place}", value, fix, repair)


def _inner(what: str, line: str, place: str, value: str, fix: str) -> Mistake:
    """Return a mistake in the last field of a flow mapping; the message's fix is the field with its value."""
    start = line.rindex(fix.partition(":")[0] + ":")
    bad = line[start:].rstrip("}]")
    return _value(what, line, place, value, fix, (bad, fix))


_TYPES = (
    _value("a quoted number", 'maxSteps: "10"', "maxSteps", '"10"', "maxSteps: 10"),
    _value("a number with a point", "maxSteps: 10.0", "maxSteps", "10.0", "maxSteps: 10"),
    _value("a number with an exponent", "maxSteps: 1e3", "maxSteps", "1000.0", "maxSteps: 1000"),
    _value("a quoted number with an exponent", 'maxSteps: "1e3"', "maxSteps", '"1e3"', "maxSteps: 1000"),
    _value("a number with underscores", "maxSteps: 1_000", "maxSteps", '"1_000"', "maxSteps: 1000"),
    _value("a number with commas", 'maxSteps: "1,000"', "maxSteps", '"1,000"', "maxSteps: 1000"),
    _value("a number with k", "maxSteps: 2k", "maxSteps", '"2k"', "maxSteps: 2000"),
    _value("a number with its unit", "maxSteps: 100 steps", "maxSteps", '"100 steps"', "maxSteps: 100"),
    _value("a number with a comment without a blank", "maxSteps: 10#ten", "maxSteps", '"10#ten"', "maxSteps: 10"),
    _value("a number in a list", "maxSteps: [10]", "maxSteps", "a list", "maxSteps: 10"),
    _value("a number in a mapping", "maxSteps: {value: 10}", "maxSteps", "a mapping", "maxSteps: 10"),
    _value("null for a number", "maxSteps: null", "maxSteps", "null", "remove maxSteps", ("maxSteps: null", "")),
    _value("no value for a number", "maxSteps:", "maxSteps", "null", "remove maxSteps", ("maxSteps:", "")),
    _value("a number in words", "maxSteps: ten", "maxSteps", '"ten"', "a whole number from 1 to 10000000"),
    _value("half a number", "maxSteps: 10.5", "maxSteps", "10.5", "a whole number from 1 to 10000000"),
    _value(
        "a number too large",
        "maxSteps: 1000000000000",
        "maxSteps",
        "1000000000000",
        "a whole number from 1 to 10000000",
        None,
    ),
    _value("a negative number of steps", "maxSteps: -5", "maxSteps", "-5", "a whole number from 1 to 10000000", None),
    _value("zero", "maxSteps: 0", "maxSteps", "0", "a whole number from 1 to 10000000", None),
    _value("hex", "seed: 0x1F", "seed", '"0x1F"', "seed: 31"),
    _value("a seed beyond 31 bits", "seed: 4294967296", "seed", "4294967296", "less than 2147483648", None),
    _inner("yes for true", "trainer: {compile: yes}", "trainer.compile", '"yes"', "compile: true"),
    _value("a quoted true", 'suspend: "true"', "suspend", '"true"', "suspend: true"),
    _value("on for true", "suspend: on", "suspend", '"on"', "suspend: true"),
    _value("off for false", "suspend: off", "suspend", '"off"', "suspend: false"),
    _value("No for false", "suspend: No", "suspend", '"No"', "suspend: false"),
    _value("1 for true", "suspend: 1", "suspend", "1", "suspend: true"),
    _value("None for null", "evaluation: None", "evaluation", '"None"', "evaluation: null"),
    _inner(
        "a number for a text",
        "trainer: {env: [{name: OMP_NUM_THREADS, value: 4}]}",
        "trainer.env[0].value",
        "4",
        "value: '4'",
    ),
    _inner(
        "true for a text",
        "trainer: {env: [{name: NCCL_IB_DISABLE, value: true}]}",
        "trainer.env[0].value",
        "true",
        "value: 'true'",
    ),
    _inner(
        "a version as a number",
        "model: {name: Qwen/Qwen3-8B, revision: 1.0}",
        "model.revision",
        "1.0",
        "revision: '1.0'",
    ),
    _value(
        "not a number", "sampling: {temperature: .nan}", "sampling.temperature", "NaN", "greater than 0 and at most 10"
    ),
    _value(
        "infinity", "trainer: {optimizer: {lr: .inf}}", "trainer.optimizer.lr", "Infinity", "a number greater than 0"
    ),
    _inner("a quoted rate", 'trainer: {optimizer: {lr: "1e-4"}}', "trainer.optimizer.lr", '"1e-4"', "lr: 0.0001"),
    _inner("a decimal comma", 'trainer: {optimizer: {lr: "0,001"}}', "trainer.optimizer.lr", '"0,001"', "lr: 0.001"),
    _value(
        "a negative temperature",
        "sampling: {temperature: -1}",
        "sampling.temperature",
        "-1",
        "greater than 0 and at most 10",
    ),
    _value(
        "a share of probability above 1",
        "sampling: {topP: 1.5}",
        "sampling.topP",
        "1.5",
        "greater than 0 and at most 1",
    ),
    _inner(
        "a share in percent",
        "evaluation: {interval: 5, sampling: {topP: 95%}}",
        "evaluation.sampling.topP",
        '"95%"',
        "topP: 0.95",
    ),
)

_UNITS = (
    _value(
        "minutes for seconds",
        "activeDeadlineSeconds: 10m",
        "activeDeadlineSeconds",
        '"10m"',
        "activeDeadlineSeconds: 600",
    ),
    _value(
        "hours for seconds",
        "activeDeadlineSeconds: 1h30m",
        "activeDeadlineSeconds",
        '"1h30m"',
        "activeDeadlineSeconds: 5400",
    ),
    _value(
        "days for seconds",
        "ttlSecondsAfterFinished: 7d",
        "ttlSecondsAfterFinished",
        '"7d"',
        "ttlSecondsAfterFinished: 604800",
    ),
    _inner(
        "seconds with their unit",
        "progress: {deadlineSeconds: 600s}",
        "progress.deadlineSeconds",
        '"600s"',
        "deadlineSeconds: 600",
    ),
    _inner(
        "ISO 8601 for seconds",
        "progress: {deadlineSeconds: PT10M}",
        "progress.deadlineSeconds",
        '"PT10M"',
        "deadlineSeconds: 600",
    ),
    _inner(
        "a quantity for GiB", "inference: {cpuKvCacheGib: 4Gi}", "inference.cpuKvCacheGib", '"4Gi"', "cpuKvCacheGib: 4"
    ),
    _inner(
        "MiB for GiB", "inference: {cpuKvCacheGib: 2048Mi}", "inference.cpuKvCacheGib", '"2048Mi"', "cpuKvCacheGib: 2"
    ),
    _inner("GB for GiB", "inference: {cpuKvCacheGib: 4GB}", "inference.cpuKvCacheGib", '"4GB"', "cpuKvCacheGib: 4"),
    _inner("hours with their unit", "budget: {gpuHours: 10h}", "budget.gpuHours", '"10h"', "gpuHours: 10"),
    _inner(
        "a size without its unit",
        "storage: {claimTemplate: {size: 100}}",
        "storage.claimTemplate.size",
        "100",
        "size: 100Gi",
    ),
    _inner(
        "a quoted size without its unit",
        'storage: {claimTemplate: {size: "100"}}',
        "storage.claimTemplate.size",
        '"100"',
        "size: 100Gi",
    ),
    _inner(
        "a size in GB", "storage: {claimTemplate: {size: 100GB}}", "storage.claimTemplate.size", '"100GB"', "size: 100G"
    ),
    _inner(
        "a size in GiB",
        "storage: {claimTemplate: {size: 100GiB}}",
        "storage.claimTemplate.size",
        '"100GiB"',
        "size: 100Gi",
    ),
    _inner(
        "a size in small letters",
        "storage: {claimTemplate: {size: 100gi}}",
        "storage.claimTemplate.size",
        '"100gi"',
        "size: 100Gi",
    ),
    _inner(
        "a size with a blank",
        "storage: {claimTemplate: {size: 100 Gi}}",
        "storage.claimTemplate.size",
        '"100 Gi"',
        "size: 100Gi",
    ),
    _inner(
        "memory in GB",
        "trainer: {resources: {limits: {memory: 16GB}}}",
        "trainer.resources.limits.memory",
        '"16GB"',
        "memory: 16G",
    ),
    _inner(
        "memory with a blank",
        "trainer: {resources: {limits: {memory: 16 Gi}}}",
        "trainer.resources.limits.memory",
        '"16 Gi"',
        "memory: 16Gi",
    ),
    _inner(
        "CPUs in words",
        "trainer: {resources: {limits: {cpu: 4 cores}}}",
        "trainer.resources.limits.cpu",
        '"4 cores"',
        "cpu: '4'",
    ),
    _inner(
        "half a CPU as a number",
        "trainer: {resources: {limits: {cpu: 0.5}}}",
        "trainer.resources.limits.cpu",
        "0.5",
        "cpu: '0.5'",
    ),
)

_CHOICES = (
    _value("a preset in capitals", "algorithm: {preset: GRPO}", "algorithm.preset", "'GRPO'", "grpo", ("GRPO", "grpo")),
    _value(
        "a preset with a dash",
        "algorithm: {preset: dr-grpo}",
        "algorithm.preset",
        "'dr-grpo'",
        "dr_grpo",
        ("dr-grpo", "dr_grpo"),
    ),
    _value(
        "a typo in a preset",
        "algorithm: {preset: gpro}",
        "algorithm.preset",
        "'gpro'",
        "did you mean grpo",
        ("gpro", "grpo"),
    ),
    _value("a loss in capitals", "algorithm: {loss: {name: PPO}}", "algorithm.loss", "'PPO'", "ppo", ("PPO", "ppo")),
    _inner("a task in small letters", "task: rl", "task", '"rl"', "task: RL"),
    _inner(
        "a number format by its short name",
        "model: {tiny: {}, dtype: bf16}",
        "model.dtype",
        '"bf16"',
        "dtype: bfloat16",
    ),
    _inner(
        "a number format in capitals",
        "model: {tiny: {}, dtype: BFloat16}",
        "model.dtype",
        '"BFloat16"',
        "dtype: bfloat16",
    ),
    _inner(
        "an optimizer in capitals",
        "trainer: {optimizer: {name: AdamW}}",
        "trainer.optimizer.name",
        '"AdamW"',
        "name: adamw",
    ),
    _inner(
        "an optimizer that is close",
        "trainer: {optimizer: {name: adam}}",
        "trainer.optimizer.name",
        '"adam"',
        "name: adamw",
    ),
    _inner(
        "a transport in small letters",
        "weightSync: {transport: filesystem}",
        "weightSync.transport",
        '"filesystem"',
        "transport: Filesystem",
    ),
    _value(
        "an access mode by its short name",
        "storage: {claimTemplate: {accessModes: [RWX]}}",
        "storage.claimTemplate.accessModes[0]",
        '"RWX"',
        "ReadWriteMany",
        ("RWX", "ReadWriteMany"),
    ),
    _inner(
        "an action in small letters", "progress: {action: restart}", "progress.action", '"restart"', "action: Restart"
    ),
    _inner(
        "a pull policy in small letters",
        "trainer: {imagePullPolicy: always}",
        "trainer.imagePullPolicy",
        '"always"',
        "imagePullPolicy: Always",
    ),
    _inner(
        "a strategy in capitals",
        "orchestrator: {trajectoryStrategy: Branching}",
        "orchestrator.trajectoryStrategy",
        '"Branching"',
        "trajectoryStrategy: branching",
    ),
    _value(
        "an environment with underscores",
        "environments: [{id: reverse_text}]",
        "environments[0].id",
        "reverse_text",
        "did you mean reverse-text",
        ("reverse_text", "reverse-text"),
    ),
    _value(
        "an environment in capitals",
        "environments: [{id: Reverse-Text}]",
        "environments[0].id",
        "Reverse-Text",
        "did you mean reverse-text",
        ("Reverse-Text", "reverse-text"),
    ),
    _value(
        "an argument in another spelling",
        "environments: [{id: reverse-text, args: {Length: 5}}]",
        "environments[0].args",
        "Length",
        "did you mean length",
        ("Length", "length"),
    ),
)

VALUES: Sequence[Mistake] = (*_TYPES, *_UNITS, *_CHOICES)
