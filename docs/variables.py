"""All settings as environment variables; see ``docs/docstrings_shown.py``."""
