"""Change the names, shapes and dtypes of a checkpoint before a load, import or export sees it.

Theory. A transform edits the manifest and moves no byte (:mod:`ckpipe.transforms.edit`). A tensor
is a set of boxes that lie by strides in entries of data files; after a transform it is one too.
"""

from __future__ import annotations
