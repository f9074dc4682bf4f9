"""Checkpoints of the trainer: DCP files with checksums, background saves, completion by a manifest, and the selection for a resume."""
