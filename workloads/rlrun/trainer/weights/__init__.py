"""Versions of a policy for the engines: Hugging Face files, publication, transfer and retention; exports for users."""
