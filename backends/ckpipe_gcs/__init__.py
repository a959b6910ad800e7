"""The Google Cloud Storage backend of ckpipe: a prefix of a bucket as a store."""

from ckpipe_gcs.backend import GcsBackend

__all__ = ["GcsBackend"]
