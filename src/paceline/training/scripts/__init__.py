"""Running a user's own training script: its task from the launcher, timing its steps, proving its gradients."""
