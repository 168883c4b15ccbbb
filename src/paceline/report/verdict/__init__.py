"""Verdict of a comparison: the headline, the sentences after it, and the next command."""
