"""Replacement of the weights in a running engine: checks, transfer, adapters and sleep."""
