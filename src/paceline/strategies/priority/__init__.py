"""`priority`: the strategy, deferred updates of parameters, and the order in which forward first uses parameters."""
