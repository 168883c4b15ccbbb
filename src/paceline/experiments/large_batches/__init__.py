"""Candidates of an experiment with large batches: the reference, and each large batch plain and with remedies."""
