"""Many short runs of the trainer, in search of what goes wrong once in a thousand."""
