"""One save: :func:`ckpipe.save.run.run_save` joins its seven stages by streams.

The stages, in their order: lock, plan, stage (the copy), serialize (checksums that the copy did not
compute), upload, commit and retention, one file each. A stage is an async function that receives
from one stream, sends to the next, and closes its own end of it. Stages interact only by the items
of the streams. The last four run in the worker process if there is one, and use only
:class:`SaveRecord` and :class:`StoreContext`. Errors of stages get the step and the rank of their
save at its end (:class:`ckpipe.running.saves.Saves`).

To add a stage: a file here, a task in ``run.py`` or ``deliver.py``, the contract of stages in
``pyproject.toml``, and ``_SAVE_PARTS`` in ``types.py`` if reports have its time.
"""

from __future__ import annotations
