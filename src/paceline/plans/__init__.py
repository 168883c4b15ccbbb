"""What a strategy puts on the wire, as pure functions of sizes: operations, bytes, peers, start. Free of torch.

One function per strategy, `(gradients, ranks, **options) -> Plan`, named in the strategy registry.
"""

from paceline.plans.plan import Gradient, Link, Operation, Plan, Transfer, all_reduce_lower_bound

__all__ = ["Gradient", "Link", "Operation", "Plan", "Transfer", "all_reduce_lower_bound"]
