"""Where the time of a step goes: timing of windows, activity of the compute thread, the time split."""
