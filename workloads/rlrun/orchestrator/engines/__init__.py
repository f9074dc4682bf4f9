"""Inference engines: discovery, health, load and weight synchronization."""
