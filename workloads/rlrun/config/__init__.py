"""The configuration of every role: `models` of its blocks, `loading` of files and arguments, `algorithm` by name,
`dialects` for other projects' names.

`rlrun.api` embeds the blocks in the `RLRun` resource; `models.run.RunConfig` is what a run resolves to (`run.json`).
"""
