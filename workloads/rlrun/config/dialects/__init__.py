"""Other projects' names for our fields, as tables of rows. The rows are data, and one translator reads them."""
