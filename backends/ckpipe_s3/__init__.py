"""The S3 backend of ckpipe: a prefix of a bucket as a store, on AWS or any compatible server."""

from ckpipe_s3.backend import S3Backend

__all__ = ["S3Backend"]
