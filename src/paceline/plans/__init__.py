"""Communication plans: the operations, bytes, peers and start times of each strategy. Imports no torch.

A plan is a pure function of sizes, `(gradients, ranks, hosts=…, **options) -> Plan`, one per strategy, named in the
strategy registry. `hosts` holds the ranks of each host; most plans do not depend on it.
"""

from paceline.plans.plan import Gradient, Operation, Plan, Transfer, all_reduce_lower_bound

__all__ = ["Gradient", "Operation", "Plan", "Transfer", "all_reduce_lower_bound"]
