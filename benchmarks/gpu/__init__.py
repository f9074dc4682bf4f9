"""Measurements of one GPU in three commands; see README.md."""
