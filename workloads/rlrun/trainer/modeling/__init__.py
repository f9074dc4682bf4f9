"""Models built by transformers, and the trainer's assumptions about them."""
