"""Messages between ranks: JSON, nested values with tensors, packed tensors."""
