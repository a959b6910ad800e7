"""Ray Train with ckpipe: ``report`` registers a checkpoint with Ray, ``load`` resumes the newest.

Both are called in the training function, on all workers. Ray keeps a small folder for a checkpoint,
with a pointer; the data lie at the root of the pipeline. Made for the API of Ray Train V2 in
Ray 2.60.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any, Unpack

from ray.train import Checkpoint, CheckpointUploadMode, get_checkpoint, get_context
from ray.train import report as report_to_ray

from ckpipe import LoadResult, SyncPipeline, SyncSaveHandle
from ckpipe.integrations.pointers import POINTER_FILE, read_pointer, write_pointer
from ckpipe.integrations.shared import tell_resumed
from ckpipe.loading.request import LoadOptions
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")


def report(handle: SyncSaveHandle, metrics: dict[str, Any]) -> None:
    """Report metrics to Ray, and the checkpoint of a save as soon as it is durable on all workers.

    Call it on all workers behind ``pipeline.save``. Returns at once but for the barrier of Ray's
    own ``report``: a thread of Ray waits for the save, and Ray registers the checkpoint once this
    thread of each worker has done so, in the order of the calls. Of a skipped save Ray gets the
    metrics only. Its ``num_to_keep`` removes pointers; the retention rules of the pipeline remove
    data. A failed save fails this worker, so Ray restarts all as its ``FailureConfig`` says.

    Args:
        handle: The handle that ``save`` has returned.
        metrics: Those of Ray's ``report``; of several workers Ray keeps those of rank 0.

    Raises:
        RuntimeError: If it is called outside a worker of Ray Train.
    """
    root = handle._pipeline.url
    if "://" not in root:  # the pointer moves to Ray's storage, where a relative path leads astray
        root = Path(root).as_uri()

    def upload(_: Checkpoint, name: str) -> Checkpoint:
        info = handle.wait()
        with tempfile.TemporaryDirectory() as folder:
            write_pointer(Path(folder, POINTER_FILE), root, info)
            pointer = Checkpoint.from_directory(folder)
            return get_context().get_storage().persist_current_checkpoint(pointer, name)

    # The upload gives Ray the real one; this one is a name only, which Ray shall not delete.
    named = Checkpoint.from_directory(f"ckpipe/{handle.id}")
    report_to_ray(
        metrics,
        checkpoint=None if handle.status == "skipped" else named,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=upload,
        delete_local_checkpoint_after_upload=False,
    )


def load(pipeline: SyncPipeline, state: Any, **options: Unpack[LoadOptions]) -> LoadResult | None:
    """Load the newest complete checkpoint, the same on all workers, registered with Ray or not.

    One that was complete when a worker died may not be registered yet; it counts. If Ray has
    registered a newer one than there is at this root, as after a change of the root, a warning says
    so. A start without a checkpoint is as the settings ``resume`` and ``initial`` say.

    Args:
        pipeline: The pipeline, open on all workers.
        state: As for :meth:`ckpipe.SyncPipeline.load`.
        **options: Further arguments of it, such as ``per_rank``.

    Returns:
        The result of the load; None if the run begins without ``initial``.

    Raises:
        CheckpointNotFound: If there is no complete checkpoint and ``resume`` is ``"must"``.
        CkpipeError: Any error of :meth:`ckpipe.SyncPipeline.load`.
    """
    chosen, registered = pipeline.choose(), get_checkpoint()
    rank = get_context().get_world_rank()
    if registered is not None and rank == 0 and pipeline.settings.resume != "never":
        with registered.as_directory() as folder:
            pointer = read_pointer(folder)
        id = None if pointer is None else CheckpointId.parse(pointer.id)
        if chosen is None or (id is not None and id > chosen.key):
            logger.warning(
                "Ray has registered %s, which is not complete at %s: %s",
                registered.path if pointer is None else f"{pointer.root}/{pointer.id}",
                pipeline.url, "the run begins anew" if chosen is None else "an older one is loaded",
            )  # fmt: skip
    if chosen is None:
        return None if pipeline.settings.initial is None else pipeline.load(state, **options)
    result = pipeline.load(state, chosen, **options)
    tell_resumed(chosen.step, f"{pipeline.url}/{chosen.id}", rank)
    return result
