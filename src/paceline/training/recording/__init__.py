"""Recording of a run on one rank: steps, windows, events and the summary."""
