"""`parameter_server`: the strategy, its workers and its servers, synchronous and asynchronous."""
