"""All-reduce algorithms of our own, each carried out message by message from its schedule in `plans/`."""
