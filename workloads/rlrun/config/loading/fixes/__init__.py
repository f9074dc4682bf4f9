"""Fixes for messages: `closest_values` and `closest_shapes` propose values, `repair` tries them and shows the first that is accepted.

`unknown` finds the place of a misplaced field, `text_slips` explains errors of syntax, `written` writes values as YAML and TOML.
"""
