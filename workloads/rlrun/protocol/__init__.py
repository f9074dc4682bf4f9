"""The file protocol of the shared volume and the messages between the roles; imports neither torch nor kopf.

`paths` names every file, `durable` writes them, `attempts` says which of them belong to this lineage, `manifest` what a checkpoint is,
`batch` and `packing` what is trained on, `channel` what trainer and orchestrator tell each other.
"""
