"""Scaling experiments: curves over ranks, cores per rank, and notes for the reader."""
