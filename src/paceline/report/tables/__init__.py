"""Rows and columns of tables, shared by the page, CSV files and JSON."""
