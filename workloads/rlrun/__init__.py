"""RLRun: one Kubernetes object is one reinforcement-learning run of a language model.

This package holds the manifest (`api`), the roles' configuration (`config`), the file and wire protocol (`protocol`) and the roles.
"""

__version__ = "0.1.0"
