"""Messages between launcher processes: the store, tokens, the handshake, heartbeats."""
