"""One save: :func:`ckpipe.save.run.run_save` joins its seven stages by streams.

The stages are lock, stage, plan, serialize, upload, commit and retain, a file each. A stage is an
async function that receives from one stream, sends to the next, and closes its own end of it.
Stages know each other only by what goes through the streams.
"""

from __future__ import annotations
