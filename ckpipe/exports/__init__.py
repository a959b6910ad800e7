"""Checkpoints in forms that other programs load."""
