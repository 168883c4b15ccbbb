"""Process groups around those of torch: timed, checked; groups that a run owns."""
