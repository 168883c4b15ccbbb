"""How ranks agree on gradients: one strategy one file, and the registry that finds them without importing torch.

To add one: its file, its plan in `paceline.plans`, one line in the registry, one test file, one changelog line.
"""
