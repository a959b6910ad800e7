"""ckpipe: an asyncio-native checkpoint pipeline for PyTorch.

Names are imported at first use, so that ``import ckpipe`` costs next to nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckpipe.version import __version__ as __version__

if TYPE_CHECKING:
    from ckpipe import distributed as distributed
    from ckpipe import errors as errors
    from ckpipe import events as events
    from ckpipe import planning as planning
    from ckpipe import preemption as preemption
    from ckpipe import testing as testing
    from ckpipe.backend import Backend as Backend
    from ckpipe.backend import Children as Children
    from ckpipe.backend import ObjectInfo as ObjectInfo
    from ckpipe.backend import PutMode as PutMode
    from ckpipe.backend import Upload as Upload
    from ckpipe.backend import UploadLimits as UploadLimits
    from ckpipe.calls import copy as copy
    from ckpipe.calls import export as export
    from ckpipe.calls import import_checkpoint as import_checkpoint
    from ckpipe.calls import inspect as inspect
    from ckpipe.calls import load as load
    from ckpipe.calls import verify as verify
    from ckpipe.data.batches import Batches as Batches
    from ckpipe.errors import CkpipeError as CkpipeError
    from ckpipe.handles import SaveHandle as SaveHandle
    from ckpipe.handles import SyncSaveHandle as SyncSaveHandle
    from ckpipe.lock.state_lock import StateLock as StateLock
    from ckpipe.pages.report import Report as Report
    from ckpipe.pages.report import report as report
    from ckpipe.plan.global_plan import GlobalPlanner as GlobalPlanner
    from ckpipe.plan.plan import LocalPlanner as LocalPlanner
    from ckpipe.retention import KeepBest as KeepBest
    from ckpipe.retention import KeepEvery as KeepEvery
    from ckpipe.retention import KeepIf as KeepIf
    from ckpipe.retention import KeepLast as KeepLast
    from ckpipe.retention import KeepWithin as KeepWithin
    from ckpipe.running.listeners import Statistics as Statistics
    from ckpipe.running.pipeline import Pipeline as Pipeline
    from ckpipe.running.pipeline import SyncPipeline as SyncPipeline
    from ckpipe.settings import Settings as Settings
    from ckpipe.state.kinds import register_type as register_type
    from ckpipe.state.wrappers import register_wrapper as register_wrapper
    from ckpipe.state_helpers import Progress as Progress
    from ckpipe.state_helpers import RngState as RngState
    from ckpipe.store.registry import register_backend as register_backend
    from ckpipe.transforms.name_tables import name_table as name_table
    from ckpipe.transforms.reshapes import Fuse as Fuse
    from ckpipe.transforms.reshapes import Rearrange as Rearrange
    from ckpipe.transforms.reshapes import Split as Split
    from ckpipe.transforms.reshapes import Stack as Stack
    from ckpipe.transforms.reshapes import Unstack as Unstack
    from ckpipe.transforms.transform import Cast as Cast
    from ckpipe.transforms.transform import Drop as Drop
    from ckpipe.transforms.transform import Only as Only
    from ckpipe.transforms.transform import Rename as Rename
    from ckpipe.types import CheckpointDescription as CheckpointDescription
    from ckpipe.types import CheckpointInfo as CheckpointInfo
    from ckpipe.types import CopyResult as CopyResult
    from ckpipe.types import DifferingCopy as DifferingCopy
    from ckpipe.types import ExportResult as ExportResult
    from ckpipe.types import LoadReport as LoadReport
    from ckpipe.types import LoadResult as LoadResult
    from ckpipe.types import Planner as Planner
    from ckpipe.types import SaveReport as SaveReport
    from ckpipe.types import TensorDescription as TensorDescription
    from ckpipe.types import ValueDescription as ValueDescription
    from ckpipe.types import VerifyResult as VerifyResult

_NAMES = {
    "backend": ("Backend", "Children", "ObjectInfo", "PutMode", "Upload", "UploadLimits"),
    "data.batches": ("Batches",),
    "calls": ("copy", "export", "import_checkpoint", "inspect", "load", "verify"),
    "errors": ("CkpipeError",),
    "handles": ("SaveHandle", "SyncSaveHandle"),
    "lock.state_lock": ("StateLock",),
    "pages.report": ("Report", "report"),
    "plan.global_plan": ("GlobalPlanner",),
    "plan.plan": ("LocalPlanner",),
    "retention": ("KeepBest", "KeepEvery", "KeepIf", "KeepLast", "KeepWithin"),
    "running.listeners": ("Statistics",),
    "running.pipeline": ("Pipeline", "SyncPipeline"),
    "settings": ("Settings",),
    "state.kinds": ("register_type",),
    "state.wrappers": ("register_wrapper",),
    "state_helpers": ("Progress", "RngState"),
    "store.registry": ("register_backend",),
    "transforms.name_tables": ("name_table",),
    "transforms.reshapes": ("Fuse", "Rearrange", "Split", "Stack", "Unstack"),
    "transforms.transform": ("Cast", "Drop", "Only", "Rename"),
    "types": (
        "CheckpointDescription",
        "CheckpointInfo",
        "CopyResult",
        "DifferingCopy",
        "ExportResult",
        "LoadReport",
        "LoadResult",
        "Planner",
        "SaveReport",
        "TensorDescription",
        "ValueDescription",
        "VerifyResult",
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

_MODULES = ("distributed", "errors", "events", "planning", "preemption", "testing")

__all__ = sorted([*_HOMES, "__version__"])


class _Package(ModuleType):
    # Hide the subpackage, which is imported with a pipeline, so that __getattr__ is asked.
    save = property(fset=lambda package, module: None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled by its name, as cloudpickle does with modules that functions refer to.
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"ckpipe.{name}")
    home = _HOMES.get(name)
    if name in ("save", "async_save", "save_checkpoint"):
        raise AttributeError(
            f"ckpipe has no function {name}: each call would begin a run of its own. Write: with "
            "ckpipe.SyncPipeline(path) as pipeline: pipeline.save(state, step=step)"
        )
    if home is None:
        raise AttributeError(f"module 'ckpipe' has no attribute {name!r}")
    value = getattr(import_module(f"ckpipe.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
