"""Checkpoints of a trainer: DCP files with checksums, saved in the background, completed by a manifest, and chosen for a resume."""
