"""The version of ckpipe."""

__version__ = "0.1.0"
