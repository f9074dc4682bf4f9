"""Configuration of every role: `models` of its blocks, `loading` of files and arguments, named `algorithm`s, and `dialects` of other
projects' names.

`rlrun.api` embeds the blocks in the `RLRun` resource. A run resolves to `models.run_config.RunConfig` (`run.json`).
"""
