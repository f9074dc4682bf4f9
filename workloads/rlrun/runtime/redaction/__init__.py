"""Data of the redactor, and its filter of logs: shapes of secrets, and the allow-list of configurations."""
