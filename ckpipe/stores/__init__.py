"""Stores below a URL: found, opened, asked again, spared."""
