"""The engine's routes under `/rlrun`, and bounds on its connections."""
