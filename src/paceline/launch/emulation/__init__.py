"""Emulated hosts on one machine: network namespaces, rate-limited links, CPU limits, and a command run on each host."""
