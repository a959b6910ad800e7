"""Share what backends of buckets behind HTTP have in common; S3 and Google Cloud Storage use it.

:mod:`ckpipe_http.buckets` has addresses, opening, the probe for conditional writes and uploads in
blocks. :mod:`ckpipe_http.requests` has options, deadlines, headers and bodies.
"""
