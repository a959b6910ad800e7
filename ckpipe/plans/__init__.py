"""Who writes what, and where in which file."""
