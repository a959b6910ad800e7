"""The local-disk backend of ckpipe: a directory as a store, written past the page cache."""

from ckpipe_local.backend import LocalBackend

__all__ = ["LocalBackend"]
