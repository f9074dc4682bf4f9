"""Simulated cluster: API server, controllers, nodes, and the roles in its pods."""
