"""Optimisers that torch does not have: one file each, without synchronisation between host and device."""
