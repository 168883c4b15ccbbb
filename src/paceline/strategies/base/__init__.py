"""The strategy interface, and bases of strategies that agree after backward or overlap with it."""
