"""Replica guard: ranks compare checksums of their weights, and measure the distance where they differ."""
