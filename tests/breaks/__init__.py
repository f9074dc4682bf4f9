"""Planted breaks: small faults in the product that the gate has to catch (docs/development.md)."""
