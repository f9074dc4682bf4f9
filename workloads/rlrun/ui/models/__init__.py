"""Answers of the page's server. Their JSON has the names of these fields in camelCase; `tools.ui_types` writes them for TypeScript."""
