"""Launching: starts the ranks with torch's elastic launcher, on one host or several, and runs each rank's job."""
