"""Find and open the store of a URL, and retry its requests."""
