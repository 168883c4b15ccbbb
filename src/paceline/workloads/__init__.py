"""What is trained: models, data sets, the sampler, and loading the user's own workload."""
