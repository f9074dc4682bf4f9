"""Proof, before a run starts, that an architecture trains as its configuration says: small models of the same shape."""
