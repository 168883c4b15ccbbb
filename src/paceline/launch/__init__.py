"""Who starts the processes: torch's elastic launcher, on this host or on many; what a rank does."""
