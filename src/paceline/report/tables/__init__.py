"""Rows of the tables that the page, CSV and JSON share, and the CSV files."""
