"""The worker process: it brings saves to the store, beside the trainer and, if need be, after it.

``python -m ckpipe.worker`` is started by :mod:`ckpipe.worker.process` and is of no use by itself.
What it has to do comes over a socket, what is to be stored lies in memory that both processes map.
The worker imports :mod:`ckpipe.worker.server` and never torch; the rest is the trainer's side.
"""
