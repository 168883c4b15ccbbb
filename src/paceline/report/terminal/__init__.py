"""Results in the terminal: tables, verdicts and the next command; the same results as JSON."""
