"""Versions of a policy for the engines: Hugging Face files, their publication, transfer and retention, and exports for people."""
