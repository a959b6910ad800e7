"""Building blocks for a source of your own, which opens a checkpoint format of another program.

A :class:`Source` reads the metadata of foreign files, by :func:`read_metadata` or
:func:`read_range`. It describes each tensor as a :class:`ForeignTensor`, whose :class:`Extent`
tell where its bytes lie, and :func:`virtual_manifest` makes the document of them.
"""

from __future__ import annotations

from ckpipe.foreign.files import check_named, read_metadata, read_range
from ckpipe.foreign.source import Source
from ckpipe.foreign.virtual import Extent, ForeignTensor, virtual_manifest

__all__ = [
    "Extent",
    "ForeignTensor",
    "Source",
    "check_named",
    "read_metadata",
    "read_range",
    "virtual_manifest",
]
