"""Evaluation of policy versions while they are trained."""
