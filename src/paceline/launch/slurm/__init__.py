"""Slurm: the rank that `srun` gives to a process, and jobs for `sbatch`. Free of torch."""
