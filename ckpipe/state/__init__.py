"""Flatten a state: its walk, its tensors and its values."""
