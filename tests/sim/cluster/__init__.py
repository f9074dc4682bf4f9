"""The simulated cluster: its API server, controllers, nodes, and the roles in its pods."""
