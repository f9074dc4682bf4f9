"""The configuration of every role, as pydantic models; imports pydantic only.

`rlrun.api` embeds these blocks in the `RLRun` resource; `rlrun.config.models.run.RunConfig` is what a run resolves to (`run.json`).
"""
