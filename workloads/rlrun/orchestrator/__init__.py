"""The orchestrator: rollouts, rewards, advantages, batches, weight hand-over, evaluation and progress, in one asyncio process.

The data flow and its owners are drawn in `rl_pipeline`. Pure: `staleness`, `tasks`, `batches.assemble`, `journal.ledger`,
`rollouts.error_budget`, `progress.step_metrics`.
"""
