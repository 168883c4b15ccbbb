"""Checks before and while a model is trained: misuse is refused where it happens, in one sentence."""
