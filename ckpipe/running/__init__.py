"""The work of a pipeline on its own event loop."""
