"""Record of an experiment on disk: candidates, runs and their folders, parity proofs, failures, outcome."""
