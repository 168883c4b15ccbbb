"""Large batches: what they lose in accuracy, what each remedy repairs, and what the noise scale predicted."""
