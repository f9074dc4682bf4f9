"""Packing of samples into micro-batches, and of those onto ranks. Pure."""
