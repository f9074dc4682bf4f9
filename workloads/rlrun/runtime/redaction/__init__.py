"""Data of the redactor, and its filter for logs: shapes of secrets, and the allow-list of configurations."""
