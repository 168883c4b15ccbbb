"""Fuzzing of all parsers of outside input: `mutations` damages valid inputs, the other modules list the parsers."""
