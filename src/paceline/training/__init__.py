"""What happens on one rank: the step loop, evaluation, BatchNorm, precision, and the proof of parity."""
