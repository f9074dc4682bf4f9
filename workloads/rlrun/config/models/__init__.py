"""The blocks of a manifest and the roles' configuration, as models."""
