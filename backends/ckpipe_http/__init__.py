"""The common code of backends for buckets behind HTTP; S3 and Google Cloud Storage use it.

:mod:`ckpipe_http.buckets` has addresses, requests, the probe for conditional writes and uploads in
blocks. :mod:`ckpipe_http.failures` translates errors by a table for each store.
:mod:`ckpipe_http.requests` has options, checksums, and the bodies of requests and answers.
"""
