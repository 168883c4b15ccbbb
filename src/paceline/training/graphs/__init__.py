"""CUDA graphs of a step: captured once, checked against steps without them, and replayed."""
