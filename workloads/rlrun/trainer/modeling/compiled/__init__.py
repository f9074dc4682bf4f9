"""Compilation of layers, and the fallback if torch's compiler fails."""
