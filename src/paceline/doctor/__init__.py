"""Examination of machines and links, run on the ranks: machine facts, reachability, latency, bandwidth, contention."""
