"""Live displays of a run, a comparison or an examination, which follow the records as they grow."""
