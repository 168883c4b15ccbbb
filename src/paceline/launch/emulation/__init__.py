"""Emulated hosts on one machine: network namespaces, rate-limited links, CPU shares, and a command run on each."""
