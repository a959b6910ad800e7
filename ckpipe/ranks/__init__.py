"""What several ranks agree on, without a collective."""
