"""Measurements on one rank: clocks, phase times of steps, operations, sockets, cores, CPU and memory samples."""
