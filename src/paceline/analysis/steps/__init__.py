"""Timing of steps: windows, activity of the compute thread, the time split."""
