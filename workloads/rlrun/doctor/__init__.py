"""Abilities of this machine: facts that are gathered without starting a run, and the meaning of each."""
