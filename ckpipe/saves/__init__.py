"""A save as its stages see it."""
