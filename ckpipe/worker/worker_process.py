"""Starting, looking at and ending a worker process: everything of it that blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import site
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from socket import socket

from ckpipe._worker import IGNORED, MARK, TELL_STACKS
from ckpipe._worker.channel import close_socket, socket_pair
from ckpipe.worker.worker_state import ProcessState, process_state

logger = logging.getLogger("ckpipe")

SHOWN_LINES = 12
"""How many of the last lines of its log the error about a dead worker shows."""

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_OLD_SECONDS = 7 * 86_400.0
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "VIRTUAL_ENV", "CKPIPE_NATIVE")
_KEPT_PREFIXES = ("LC_", "LD_")
_FIRST_IMPORTS = ("ckpipe", "anyio", "typing_extensions")
"""What a worker imports before it has the trainer's import path, but for the standard library."""


class WorkerProcess:
    """A worker process, from its start to its end. Its methods block, but for a moment only.

    Args:
        log_dir: Where its log goes; None for a private directory of temporary files.

    Raises:
        OSError: If it cannot be started.
        RuntimeError: If the system starts no thread.
    """

    def __init__(self, log_dir: str | None) -> None:
        self.log = _new_log(log_dir)
        self.socket, theirs = socket_pair()
        self._burying = threading.Lock()
        self.end: Future[int | None] = Future()
        """Its exit code, once it has ended; None if the system does not say."""
        try:
            self.id = self._started(theirs).pid
        except BaseException:
            close_socket(self.socket)
            raise
        finally:
            close_socket(theirs)

    def _started(self, theirs: socket) -> subprocess.Popen[bytes]:
        """Starts it on a thread of its own, which stays until its end and buries it.

        To the kernel, its parent is a thread: the end of one that starts it and goes on to other
        work would look to it like the end of the trainer, prctl(2).
        """
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(
            target=self._keep, args=(theirs, started), name="ckpipe worker's keeper", daemon=True
        ).start()
        return started.result()

    def _keep(self, theirs: socket, started: Future[subprocess.Popen[bytes]]) -> None:
        # The worker inherits this, and ignores them once it can: one that starts must not die.
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            process = self._start(theirs)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        code = _exit_code(process.pid)
        with self._burying:  # its number is its own until then
            process.wait()
            self.end.set_result(code)

    def _start(self, theirs: socket) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "ckpipe._worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=first_environment() | {MARK: str(os.getpid())},
            )

    def state(self) -> ProcessState | None:
        """What the system says of it; None if it is gone."""
        return process_state(self.id)

    def kill(self) -> None:
        """Ends it at once: no instruction of it runs after this, though it may not be gone yet."""
        self._send(signal.SIGKILL)

    def tell_stacks(self) -> None:
        """Has it write to its log where its threads are, if it still can."""
        self._send(TELL_STACKS)

    def _send(self, each: signal.Signals) -> None:
        with self._burying, contextlib.suppress(ProcessLookupError):
            if not self.end.done():
                os.kill(self.id, each)

    def ended(self, seconds: float) -> bool:
        """Waits for its end for so long; whether it has ended."""
        return bool(wait([self.end], seconds).done)

    @property
    def crashed(self) -> bool:
        """Whether it ended by a fault of its own code, which would end this process as well."""
        code = self.end.result() if self.end.done() else None
        return code is not None and -code in _FAULTS

    def describe_end(self) -> str:
        """How it ended, as an error says it."""
        if not self.end.done():
            return "the system has not ended it yet"
        if (code := self.end.result()) is None:
            return "exit code unknown, since this program ignores SIGCHLD or has waited for it"
        return f"exit code {code}"

    def last_lines(self) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-SHOWN_LINES:])

    def forget_log(self) -> None:
        """Removes the log, of which nobody needs a word."""
        with contextlib.suppress(OSError):
            self.log.unlink()


def _exit_code(process: int) -> int | None:
    """Waits for the end of a child; its exit code, negative for a signal, None if nobody tells."""
    try:
        end = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # by now it has ended: waitpid(2), of SIGCHLD
        return None
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def first_environment() -> dict[str, str]:
    """What the interpreter itself needs; all else, which may be secret, goes over the socket."""
    taken = _KEPT_PREFIXES if sys.flags.ignore_environment else (*_KEPT_PREFIXES, "PYTHON")
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(taken)
    }
    if sys.flags.no_user_site:
        kept["PYTHONNOUSERSITE"] = "1"
    # Behind all that is there, which may be meant to go first.
    if path := [*filter(None, [kept.get("PYTHONPATH")]), *_homes()]:
        kept["PYTHONPATH"] = os.pathsep.join(path)
    return kept


def _homes() -> list[str]:
    """Where the interpreter would not look by itself for what a worker imports at first."""
    known = {*site.getsitepackages(), site.getusersitepackages() if site.ENABLE_USER_SITE else ""}
    homes = []
    for name in _FIRST_IMPORTS:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin:
            inside = spec.submodule_search_locations is not None
            homes.append(str(Path(spec.origin).parents[1 if inside else 0]))
    return [home for home in dict.fromkeys(homes) if home not in known]


def _new_log(directory: str | None) -> Path:
    if directory is None:
        folder = _private_folder()
    else:
        folder = Path(directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    _remove_old(folder)
    path = folder / f"worker-{os.getpid()}-{secrets.token_hex(4)}.log"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return path


def _private_folder() -> Path:
    """A directory that nobody else can write to, the same for all processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"ckpipe-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        return folder
    return Path(tempfile.mkdtemp(prefix="ckpipe-"))  # somebody else has made that name theirs


def _remove_old(folder: Path) -> None:
    for path in folder.glob("worker-*.log"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                path.unlink()


__all__ = ["WorkerProcess", "first_environment"]
