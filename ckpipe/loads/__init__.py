"""From a checkpoint into a state: planned, read, verified, put together."""
