"""Pure functions on records: they return data and never draw. Free of torch."""
