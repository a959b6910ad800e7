"""The worker process: it brings saves to the store beside the trainer, and also after its end.

:mod:`ckpipe.worker.process` starts ``python -m ckpipe.worker``, which is of no use by itself. It
gets messages over a socket, and reads the bytes from memory that both processes map. The worker
imports :mod:`ckpipe.worker.server` and never torch; the other modules run in the trainer.
"""
