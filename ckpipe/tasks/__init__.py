"""Tasks, threads and processors."""
