"""What a pipeline runs on its own event loop."""
