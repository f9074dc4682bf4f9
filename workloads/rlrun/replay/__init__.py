"""Replay of a run's step: its files on the volume, a repeated computation with comparison, explanation of a sample, and
fork of a run.

This package never writes to the folder of the replayed run.
"""
