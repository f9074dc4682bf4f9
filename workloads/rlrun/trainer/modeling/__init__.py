"""Models of transformers: loading, sharding, attention over packed rows, adapters."""
