"""Decide whether a pipeline can use a worker process, and make its first message.

Note 79 of ``docs/design.md`` tells in which form the settings cross.
"""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from ckpipe.backend import Backend
from ckpipe.errors import SettingsError, UsageError
from ckpipe.settings import Settings
from ckpipe.store.registry import is_registered_here, scheme_of
from ckpipe.worker.process import LOOKS
from ckpipe.worker.protocol import MARK, Init, can_cross

logger = logging.getLogger("ckpipe")


def refuse_to_train_as_worker() -> None:
    """Stop a program that was started by mistake in place of a worker's Python interpreter.

    If ``sys.executable`` is the program itself, each worker would be another run of the program,
    with a worker of its own. A real worker process first adopts the environment of its trainer,
    which lacks the mark.

    Raises:
        UsageError: If this process is such a program.
    """
    if trainer := os.environ.get(MARK):
        raise UsageError(
            f"This program was started as a worker process by process {trainer}, since "
            f"sys.executable is no Python interpreter there, but {sys.executable}",
            hint="Set worker='thread'",
        )


def uses_process(settings: Settings, backend: Backend) -> bool:
    """True if a worker process brings the saves of a pipeline to the store; block.

    Args:
        settings: The settings; ``url`` is set.
        backend: The store; ``prefers_worker`` counts.

    Raises:
        SettingsError: If the settings ask for a process and an object cannot cross to it.
    """
    mode = settings.worker.mode
    if mode == "thread" or (mode == "auto" and not backend.prefers_worker) or settings.read_only:
        return False
    reason = obstacle(settings)
    if reason is None:
        try:
            os.close(os.memfd_create("ckpipe"))
        except OSError as error:  # by a filter of system calls (seccomp), as containers have them
            said = "Saves are brought to the store by a thread: the system refuses memfd_create, %s"
            logger.warning(said, error)
            return False
        return True
    if mode == "process":
        raise SettingsError(
            f"worker='process' cannot be had: {reason}",
            hint="Set worker='thread', or 'auto' to use a process only where one is possible",
        )
    level = logging.WARNING if _is_frozen() else logging.INFO
    logger.log(level, "Saves are brought to the store by a thread: %s", reason)
    return False


def _is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))


def obstacle(settings: Settings) -> str | None:
    """Return the reason why no other process can bring a pipeline's saves to the store, or None."""
    url, rule = settings.url or "", settings.retention.rule
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return "this system has no memfd_create or pidfd_open to share memory with a process"
    if not sys.executable:
        return "this program does not know its own interpreter"
    if _is_frozen():
        return "this program is frozen (sys.frozen), so there is no interpreter to start"
    if is_registered_here(url):
        return (
            f"the backend for {scheme_of(url)!r} was registered in this process only, "
            "and not by an entry point of an installed package"
        )
    if not can_cross(settings.backends.get(scheme_of(url), {})):
        return f"an option of the backend for {scheme_of(url)!r} is an object of this process"
    try:
        if rule is not None:
            rule.to_data()
    except SettingsError:
        return "a retention rule holds a Python function of this process"
    return None


def make_init(settings: Settings, rank: int, world_size: int) -> Init:
    """Make the first message for the workers of a pipeline from the present settings; blocking.

    The root and the backend's options may depend on the directory and the environment. A worker
    that is started later also gets those of the opening. Otherwise it would save elsewhere after
    the program has changed its directory.
    """
    scheme = scheme_of(settings.url or "")
    own = {scheme: settings.backends.get(scheme, {})}
    record = _record_of(settings.model_copy(update={"backends": own}), Settings)
    del record.plan, record.export  # a planner and transforms may be objects of this process
    try:
        directory, path = os.getcwd(), [os.path.abspath(each) for each in sys.path]
    except OSError:  # the directory was deleted
        directory, path = "/", [each for each in sys.path if os.path.isabs(each)]
    return Init(
        trainer=os.getpid(),
        path=path,
        directory=directory,
        environment=dict(os.environ),
        settings=record,
        rank=rank,
        world_size=world_size,
        heartbeat=settings.worker.hang_seconds / LOOKS,
    )


def _record_of(settings: BaseModel, kind: type[BaseModel]) -> Any:
    """Copy settings to records with the same names, so that a worker imports no pydantic."""
    properties = [name for name, each in vars(kind).items() if isinstance(each, property)]
    values = {name: getattr(settings, name) for name in (*kind.model_fields, *properties)}
    groups = {n: _record_of(v, type(v)) for n, v in values.items() if isinstance(v, BaseModel)}
    return SimpleNamespace(**values | groups)
