"""Compiled layers, and what a run does where torch's compiler fails."""
