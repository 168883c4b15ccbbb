"""Examination of machines and links by the ranks themselves: facts, reachability, latency, bandwidth, contention."""
