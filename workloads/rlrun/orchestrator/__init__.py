"""Orchestrator role: rollouts, rewards, advantages, batches, weight hand-over, evaluation and progress in one asyncio
process.

`attempt` opens and closes the resources that all tasks of the role share. `rl_pipeline` draws the data flow of RL and
its owners. Pure modules: `staleness`, `tasks`, `journal.ledger`, `progress.step_metrics`.
"""
