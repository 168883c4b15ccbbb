"""What a strategy puts on the wire, as pure functions of sizes: operations, bytes, peers, start. Free of torch.

One function per strategy, `(gradients, ranks, hosts=…, **options) -> Plan`, named in the strategy registry. `hosts` are
the ranks of each host; a plan that does not depend on who sits where passes it over.
"""

from paceline.plans.plan import Gradient, Operation, PairTraffic, Plan, Transfer, all_reduce_lower_bound

__all__ = ["Gradient", "Operation", "PairTraffic", "Plan", "Transfer", "all_reduce_lower_bound"]
