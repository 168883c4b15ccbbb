"""Clocks, per-step phase times, and what the machine gives us: cores and, later, CPU and memory samples."""
