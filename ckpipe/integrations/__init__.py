"""Adaptors for the trainers that people run: one module each, imported by its user only.

``import ckpipe.integrations.transformers`` needs transformers, and so on; the extras of the same
names install them. What an adaptor may rely on is public: a trainer of your own can use
:mod:`ckpipe.integrations.pointers`, :meth:`ckpipe.Pipeline.choose` and
:func:`ckpipe.distributed.training_state` in the same way.
"""
