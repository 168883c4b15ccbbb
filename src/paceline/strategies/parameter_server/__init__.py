"""`parameter_server`: its strategy, its workers and servers, synchronous and asynchronous."""
