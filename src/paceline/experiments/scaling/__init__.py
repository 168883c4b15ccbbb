"""What a scaling experiment measures and how long it takes: shapes of ranks, batches, machines, estimate."""
