"""Execution of a user's training script: its task, the timing of its steps, the proof of its gradients."""
