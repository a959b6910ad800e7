"""Take a state apart: its walk, its tensors and its values."""
