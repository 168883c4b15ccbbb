"""The strategy interface, and base classes for strategies that synchronise after backward or overlap with it."""
