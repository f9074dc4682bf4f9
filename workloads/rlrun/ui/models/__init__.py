"""Responses of the page's server. JSON uses these field names in camelCase; `tools.ui_types` generates the TypeScript types."""
