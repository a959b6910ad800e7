"""Adaptors for the trainers that people run: one module each, imported by its user only.

``import ckpipe.integrations.transformers`` needs transformers, and so on; the extras of the same
names install them. A trainer of your own can use the same parts: :meth:`ckpipe.Pipeline.choose`,
:meth:`ckpipe.Pipeline.read_boxes`, :func:`ckpipe.distributed.training_state`,
:mod:`ckpipe.integrations.pointers` and :func:`ckpipe.integrations.shared.choose_path`. The adaptors
of DCP and Ray use a few private names beside them.
"""
