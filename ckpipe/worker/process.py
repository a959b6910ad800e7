"""Start, observe and end a worker process: all blocking calls for it.

Silence proves no hang: a machine that pages, a disk that does not answer, a debugger or a stopped
process group can silence a healthy worker for any time. A process hangs if it has sent no message
for a time, and many looks within that time found all its threads asleep.
"""

from __future__ import annotations

import contextlib
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
from glob import glob
from pathlib import Path
from socket import socket

from ckpipe.worker.channel import close_socket, socket_pair
from ckpipe.worker.protocol import IGNORED, MARK, TELL_STACKS

LOOKS = 30
"""Number of looks in a row at a silent and sleeping process after which it counts as hanging."""

_PF_SIGNALED = 0x400  # <linux/sched.h>
_SIGKILL_PENDING = 1 << signal.SIGKILL - 1


def is_held(id: int) -> bool:
    """True if the system keeps a process from running, so that it may go on later.

    One of its threads runs or waits for a processor (``R``), waits for a device (``D``) or is
    stopped (``T``, ``t``), and is not killed: proc(5). All threads count: the thread of the event
    loop may sleep because another one holds an import's lock or the GIL.
    """
    for file in glob(f"/proc/{id}/task/*/stat"):
        with contextlib.suppress(OSError):  # that thread has just ended
            # The name in parentheses may contain any characters, parentheses too.
            fields = Path(file).read_bytes().rpartition(b") ")[2].split()
            killed = int(fields[6]) & _PF_SIGNALED or int(fields[28]) & _SIGKILL_PENDING
            if fields[0] in (b"R", b"D", b"T", b"t") and not killed:
                return True
    return False


SHOWN_LINES = 12
"""Number of the last lines of the log in the error about a dead worker."""

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_OLD_SECONDS = 7 * 86_400.0
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "VIRTUAL_ENV", "CKPIPE_NATIVE")
_KEPT_PREFIXES = ("LC_", "LD_")
_FIRST_IMPORTS = ("ckpipe", "anyio", "typing_extensions")
"""Modules that a worker imports before it has the trainer's import path, besides the standard
library."""


class WorkerProcess:
    """A worker process, from its start to its end. Its methods block only briefly.

    Args:
        log_dir: The directory of its log; None for a private directory of temporary files.

    Raises:
        OSError: If it cannot be started.
        RuntimeError: If the system cannot start a thread.
    """

    def __init__(self, log_dir: str | None) -> None:
        self.log = _new_log(log_dir)
        self.socket, theirs = socket_pair()
        self._burying = threading.Lock()
        self.end: Future[int | None] = Future()
        """Its exit code, once it has ended, negative for a signal; None if that is unknown."""
        try:
            self.id = self._started(theirs).pid
        except BaseException:
            close_socket(self.socket)
            raise
        finally:
            close_socket(theirs)

    def _started(self, theirs: socket) -> subprocess.Popen[bytes]:
        """Start it on a thread of its own, which waits for its end and reaps it.

        To the kernel, the parent of a process is a thread. If that thread ended before the worker,
        it would look to the worker like the end of the trainer, prctl(2).
        """
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(
            target=self._keep, args=(theirs, started), name="ckpipe worker's keeper", daemon=True
        ).start()
        return started.result()

    def _keep(self, theirs: socket, started: Future[subprocess.Popen[bytes]]) -> None:
        # The worker inherits the mask, and ignores the signals once it can: it must not die while
        # it starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            with open(self.log, "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ckpipe.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=first_environment() | {MARK: str(os.getpid())},
                )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        try:
            end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # it has ended and was reaped: waitpid(2), of SIGCHLD
            code = None
        else:
            assert end is not None
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with self._burying:  # until then no other process gets its id
            process.wait()
            self.end.set_result(code)

    def kill(self) -> None:
        """Kill it: it runs no more instructions after this, but may still exist for a while."""
        self._send(signal.SIGKILL)

    def tell_stacks(self) -> None:
        """Make it write the stacks of its threads to its log, if it still can."""
        self._send(TELL_STACKS)

    def _send(self, each: signal.Signals) -> None:
        with self._burying, contextlib.suppress(ProcessLookupError):
            if not self.end.done():
                os.kill(self.id, each)

    def ended(self, seconds: float) -> bool:
        """Wait for its end for so many seconds; True if it has ended."""
        return bool(wait([self.end], seconds).done)

    @property
    def crashed(self) -> bool:
        """True if it ended by a fault of its own code, which would crash this process too."""
        code = self.end.result() if self.end.done() else None
        return code is not None and -code in _FAULTS

    def describe_end(self) -> str:
        """Describe its end, for an error."""
        if not self.end.done():
            return "the system has not ended it yet"
        if (code := self.end.result()) is None:
            return "exit code unknown, since this program ignores SIGCHLD or has waited for it"
        return f"exit code {code}"

    def log_bytes(self) -> int:
        """Return the size of its log; 0 if it is gone."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def last_lines(self) -> str:
        """Return the end of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-SHOWN_LINES:])

    def forget_log(self) -> None:
        """Remove the log."""
        with contextlib.suppress(OSError):
            self.log.unlink()


def first_environment() -> dict[str, str]:
    """Return the environment that Python itself needs; the rest, which may hold secrets, goes over
    the socket.
    """
    taken = _KEPT_PREFIXES if sys.flags.ignore_environment else (*_KEPT_PREFIXES, "PYTHON")
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(taken)
    }
    if sys.flags.no_user_site:
        kept["PYTHONNOUSERSITE"] = "1"
    # At the end: earlier paths may be meant to come first.
    if path := [*filter(None, [kept.get("PYTHONPATH")]), *_homes()]:
        kept["PYTHONPATH"] = os.pathsep.join(path)
    return kept


def _homes() -> list[str]:
    """Return directories of the worker's first imports that are not on Python's own path."""
    known = {*site.getsitepackages(), site.getusersitepackages() if site.ENABLE_USER_SITE else ""}
    homes = []
    for name in _FIRST_IMPORTS:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin:
            inside = spec.submodule_search_locations is not None
            homes.append(str(Path(spec.origin).parents[1 if inside else 0]))
    return [home for home in dict.fromkeys(homes) if home not in known]


def _new_log(directory: str | None) -> Path:
    """Create a log file, and remove old ones from its directory."""
    if directory is None:
        folder = _private_folder()
    else:
        folder = Path(directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("worker-*.log"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                path.unlink()
    path = folder / f"worker-{os.getpid()}-{secrets.token_hex(4)}.log"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return path


def _private_folder() -> Path:
    """Return a directory that only this user can write to, the same for all its processes."""
    folder = Path(tempfile.gettempdir()) / f"ckpipe-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        return folder
    return Path(tempfile.mkdtemp(prefix="ckpipe-"))  # another user has taken that name
