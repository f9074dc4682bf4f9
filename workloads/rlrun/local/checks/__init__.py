"""Checks of `judge`: `architecture` proves that models can be trained, `contradictions` finds values that conflict with others."""
