"""Other projects' names for our fields, as tables of rows: what becomes of each key is data, read by one translator."""
