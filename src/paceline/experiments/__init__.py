"""Experiments: the checks, runs, order and repeats behind each command."""
