"""Results in the terminal: tables, verdicts and the next command; and the same as JSON."""
