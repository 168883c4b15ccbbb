"""Checkpoints of a run: when they are written, what they hold, how a run goes on; `storage/` has the files."""
