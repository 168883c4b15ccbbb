"""Memory that the ranks of one host share: its allocation, progress counters in it, and all-reduce through it."""
