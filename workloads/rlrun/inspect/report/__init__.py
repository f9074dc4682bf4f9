"""Bundle for a bug report: its contents, and the removal of secrets."""
