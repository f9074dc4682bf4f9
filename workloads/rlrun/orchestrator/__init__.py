"""The orchestrator: rollouts, rewards, advantages, batches, weight hand-over, evaluation and progress, in one asyncio process.

Pure: `staleness`, `sampler`, `ledger`, `batcher`, `errors`, `metrics`. The data flow and its owners are drawn in `pipeline`.
"""
