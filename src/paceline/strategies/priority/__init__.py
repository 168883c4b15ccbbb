"""`priority`: its strategy, the updates it defers, and the order in which forward first uses each parameter."""
