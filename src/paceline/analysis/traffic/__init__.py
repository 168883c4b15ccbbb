"""Traffic between ranks: operations on the wire, bytes counted at sockets, and waits for other ranks."""
