"""Communication between ranks: joining the world, the process groups of a run, and the network interface to use."""

from paceline.comm.group import Comm, close_comm, from_rank_0, open_comm
from paceline.comm.world import World, join_world, leave_world, share_world

__all__ = ["Comm", "World", "close_comm", "from_rank_0", "join_world", "leave_world", "open_comm", "share_world"]
