"""Figures of every table: one entry per figure, from which the terminal, the page, CSV and JSON are generated."""
