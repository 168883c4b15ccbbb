"""Training on one rank: the step loop, evaluation, BatchNorm over ranks, precision, recording, the parity proof."""
