"""Parts of an experiment over batch sizes: its points, and the speed of a core in a matrix product."""
