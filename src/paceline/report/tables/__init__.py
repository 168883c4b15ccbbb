"""Rows and columns of the tables, shared by the page, CSV files and JSON."""
