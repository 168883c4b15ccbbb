"""Races to a test accuracy: the time of each run, the score of a race, and the leaderboard of several races."""
