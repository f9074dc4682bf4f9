"""The engines: discovery, health, load, and synchronization of their weights."""
