"""Paceline's own all-reduce algorithms. Each runs the messages of its schedule in `plans/` one by one."""
