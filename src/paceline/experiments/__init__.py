"""Which runs, in which order, how often: what stands behind each command."""
