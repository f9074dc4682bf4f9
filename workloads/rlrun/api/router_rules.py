"""Admission rules of `trainer.router`: the same refusals as `RouterConfig.replay_problem`, `balance_problem` and the specification."""

from __future__ import annotations

from rlrun.config.base import Rule

_GIVEN = (
    ("self.router.freeze", "freeze (true)", "freeze: false"),
    ("self.router.bias == 'Update'", "bias (Update)", "bias: Frozen"),
    ("self.router.auxLoss > 0.0", "auxLoss ({self.router.auxLoss})", "auxLoss: 0"),
)

TRAINER_RULES = (
    Rule(
        "self.router.replay != 'Step' || self.parallelism.pp == 1",
        "router.replay (Step) records experts row by row, which the stages of parallelism.pp ({self.parallelism.pp}) do not compute in "
        "order; set router.replay: Rollout or pp: 1",
        ".router",
    ),
    Rule(
        "self.router.replay != 'Step' || self.updatesPerStep > 1",
        "router.replay (Step) has no effect with updatesPerStep (1), because the update is the first pass of a step; set router.replay: "
        "Off, or updatesPerStep: 2 or more",
        ".router",
    ),
    Rule(
        "self.router.replay == 'Off' || !has(self.sharedWith)",
        "router.replay ({self.router.replay}) is not supported with sharedWith ({self.sharedWith}); set router.replay: Off",
        ".router",
    ),
    Rule(
        "self.router.replay == 'Off' || !has(self.lora) || self.lora.slots == 1",
        "router.replay ({self.router.replay}) is not supported for a trainer of several runs, but lora.slots is {self.lora.slots}; set "
        "router.replay: Off or lora.slots: 1",
        ".router",
    ),
    *(
        Rule(
            f"!({given}) || !has(self.lora)",
            f"router.{text} is not supported with lora, whose adapters keep the routers; set router.{remedy}",
            ".router",
        )
        for given, text, remedy in _GIVEN
    ),
    *(
        Rule(
            f"self.router.auxLoss == 0.0 || self.parallelism.{name} == 1",
            f"router.auxLoss ({{self.router.auxLoss}}) is not supported with parallelism.{name} ({{self.parallelism.{name}}}); set "
            f"parallelism.{name}: 1 or router.auxLoss: 0",
            ".router",
        )
        for name in ("tp", "pp")
    ),
)
"""Rules of the trainer's block."""
SPEC_RULES = (
    Rule(
        "self.trainer.router.replay != 'Rollout' || self.task == 'RL'",
        "trainer.router.replay (Rollout) needs tokens that an engine sampled for training, but task is {self.task}; set "
        "trainer.router.replay: Off",
        ".trainer.router",
    ),
    Rule(
        "self.trainer.router.replay != 'Rollout' || self.task != 'RL' || self.inference.gpusPerReplica > 0",
        "trainer.router.replay (Rollout) needs engines on GPUs, because vLLM's build for CPUs does not return experts, but "
        "inference.gpusPerReplica is 0; set trainer.router.replay: Off or inference.gpusPerReplica",
        ".trainer.router",
    ),
)
"""Rules of the whole specification. Whether `Step` has its first pass depends on the preset, which only the models know."""
