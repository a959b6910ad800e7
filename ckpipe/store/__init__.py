"""Find and open the store of a URL, and try its requests again."""
