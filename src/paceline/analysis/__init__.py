"""Pure functions on records. They return data and never draw; `report` does. Free of torch."""
