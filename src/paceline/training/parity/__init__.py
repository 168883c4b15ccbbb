"""The parity proof: a strategy's gradients against those of one process on the same shards."""
