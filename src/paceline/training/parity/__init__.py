"""Parity proof: compares a strategy's gradients with those of one process on the same shards."""
