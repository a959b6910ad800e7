"""The trainer's side of the worker process."""
