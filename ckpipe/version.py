"""The version of ckpipe, and how to install more of it."""

__version__ = "0.1.0"


def install_line(extra: str) -> str:
    """Name the command that adds an extra: in a clone, as ckpipe is in no package registry."""
    return f"pip install '.[{extra}]' in a clone of ckpipe"
