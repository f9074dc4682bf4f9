"""New weights in a running engine: checks, transfer, adapters, and sleep."""
