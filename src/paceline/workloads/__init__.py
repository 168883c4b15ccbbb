"""Workloads: models, data sets, the sampler, and loading of a user's workload."""
