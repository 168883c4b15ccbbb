"""Memory that the ranks of one host share: its allocation, its progress counters, and the all-reduce through it."""
