"""Start, observe and end a worker process: all blocking calls for it.

A hang is judged by the process state of the system. Silence proves nothing: a machine that pages, a
disk that does not answer, a debugger or a stopped process group can silence a healthy worker for
any time. A process hangs if in many checks in a row it has sent no message, all its threads sleep,
and it has done no work since the check before.
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
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from ckpipe.worker.channel import close_socket, socket_pair
from ckpipe.worker.protocol import IGNORED, MARK, TELL_STACKS

LOOKS = 30
"""Number of checks in a row with the same result after which a process counts as hanging."""

_PF_SIGNALED = 0x400  # <linux/sched.h>
_PENDING = ("SigPnd:", "ShdPnd:")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process and its threads.

    Args:
        letter: ``R`` for running, ``S`` for sleeping, ``D`` for waiting for a device, ``T`` or
            ``t`` for stopped, ``Z`` for ended: proc(5). ``S`` only if all threads sleep.
        work: Clock ticks that its threads have used, and pages that they had to wait for.
        killed: True if a signal ends it. It may still exist while it waits for a device, but runs
            no more instructions.
    """

    letter: str
    work: int
    killed: bool = False


def parse_state(stat: bytes) -> ProcessState:
    """Read the state in a ``/proc/…/stat``: proc(5), fields 3, 9, 12, 14 and 15."""
    # The name in parentheses may contain any characters, parentheses too.
    fields = stat[stat.rindex(b")") + 2 :].split()
    work = int(fields[9]) + int(fields[11]) + int(fields[12])
    return ProcessState(fields[0].decode(), work, bool(int(fields[6]) & _PF_SIGNALED))


def process_state(id: int) -> ProcessState | None:
    """Read the state of a process and its threads; None if it has ended.

    All threads count: the thread of the event loop may sleep because another thread holds an
    import's lock or the GIL, and waits for a disk, a processor or a debugger.
    """
    folder = Path(f"/proc/{id}")
    letters = set()
    try:
        state = parse_state((folder / "stat").read_bytes())
        for task in (folder / "task").iterdir() if state.letter == "S" else ():
            with contextlib.suppress(OSError):  # that thread has just ended
                letters.add(parse_state((task / "stat").read_bytes()).letter)
        status = (folder / "status").read_text().splitlines()
    except OSError:
        return None
    pending = [int(line.split()[1], 16) for line in status if line.startswith(_PENDING)]
    return ProcessState(
        letter=next((each for each in "DRTt" if each in letters), state.letter),
        work=state.work,
        killed=state.killed or any(mask & 1 << signal.SIGKILL - 1 for mask in pending),
    )


def is_still(now: ProcessState | None, before: ProcessState | None) -> bool:
    """True if a process sleeps and has done no work between two checks."""
    return now is not None and now.letter == "S" and now == before


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
