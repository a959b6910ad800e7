"""Share what backends of buckets behind HTTP have in common; S3 and Google Cloud Storage use it.

:mod:`ckpipe_http.buckets` has addresses, requests, the probe for conditional writes and uploads in
blocks. :mod:`ckpipe_http.failures` translates errors by a table for each store.
:mod:`ckpipe_http.requests` has options and checksums, :mod:`ckpipe_http.requests` reads answers.
"""
