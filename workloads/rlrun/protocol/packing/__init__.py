"""Packing of samples into micro-batches, and of micro-batches onto ranks. Pure."""
