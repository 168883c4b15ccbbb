"""Parts of a scaling experiment: shapes of ranks, points with their batches, shared machines."""
