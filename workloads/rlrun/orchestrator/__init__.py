"""The orchestrator: rollouts, rewards, advantages, batches, weight hand-over, evaluation and progress, in one asyncio process.

`attempt` begins and ends what all tasks of the role share. The data flow of RL and its owners are drawn in `rl_pipeline`. Pure:
`staleness`, `tasks`, `batches.assemble`, `journal.ledger`, `rollouts.error_budget`, `progress.step_metrics`.
"""
