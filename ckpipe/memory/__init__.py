"""Host memory for staging, and copies into it."""
