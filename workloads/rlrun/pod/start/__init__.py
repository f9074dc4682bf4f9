"""Preconditions of a role's start: folders, the run's claim to them, the configuration file, the other pods."""
