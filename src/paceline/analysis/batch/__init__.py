"""Batch-size efficiency: time per epoch, utilisation and training progress at each batch size."""
