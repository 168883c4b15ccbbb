"""Strategies: how ranks synchronise gradients. One strategy per file, and a registry that does not import torch.

To add a strategy, add its file, its plan in `paceline.plans`, one line in the registry, one test file and one line in
the changelog.
"""
