"""Fixes for messages: `closest_values` proposes values, `repair` tests them and shows the first valid one.

`unknown` finds the place of a misplaced field, `text_slips` explains syntax errors, `written` formats values as YAML and TOML.
"""
