"""Slurm: the position of a task that `srun` started, and job scripts for `sbatch`. Free of torch."""
