"""Failures: their causes, hangs, restarts, signals."""
