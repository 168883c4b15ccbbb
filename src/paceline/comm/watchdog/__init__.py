"""Watchdog of the ranks: each rank reports what it does over a connection of its own, and a judge detects a hang."""
