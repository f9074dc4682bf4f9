"""Parts of a training step."""
