"""Live displays of a run, a comparison or a scaling experiment, which follow the records as they grow."""
