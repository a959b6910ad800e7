"""Read checkpoints that other programs wrote, as if ckpipe had written them.

Theory. A foreign checkpoint is described by a *virtual manifest*: the document that ckpipe's own
index gives, whose data files are foreign ones. Match, read plan and reader are then the same for
all formats. A :class:`~ckpipe.foreign.source.Source` knows one format. It reads only the metadata
of its files, and refuses what contradicts itself before a byte reaches a tensor. Nothing from a
file is ever run. :mod:`ckpipe.foreign.source` chooses the source of a place.
"""
