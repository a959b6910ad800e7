"""The checkpoints of a root: found, completed, held, compared, copied, removed."""
