"""Start, look at and end a worker process: everything of it that blocks.

Whether it hangs is judged by what the system says of it. Silence proves nothing: a machine that
pages, a disk that does not answer, a debugger or a stopped process group silence a healthy worker
for as long as they like. A process hangs if in many looks in a row it has said nothing, all its
threads sleep, and it has done no work since the look before.
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
"""How many looks in a row have to find the same before a process is taken to hang."""

_PF_SIGNALED = 0x400  # <linux/sched.h>
_PENDING = ("SigPnd:", "ShdPnd:")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process and its threads.

    Args:
        letter: ``R`` for running, ``S`` for sleeping, ``D`` for waiting for a device, ``T`` or
            ``t`` for stopped, ``Z`` for ended: proc(5). ``S`` only if all threads sleep.
        work: Clock ticks that its threads have used, and pages that they had to wait for.
        killed: Whether a signal ends it. It may not be gone while it waits for a device, but no
            instruction of it runs any more.
    """

    letter: str
    work: int
    killed: bool = False


def parse_state(stat: bytes) -> ProcessState:
    """Read the state in a ``/proc/…/stat``: proc(5), fields 3, 9, 12, 14 and 15."""
    # The name in parentheses may hold anything, parentheses too.
    fields = stat[stat.rindex(b")") + 2 :].split()
    work = int(fields[9]) + int(fields[11]) + int(fields[12])
    return ProcessState(fields[0].decode(), work, bool(int(fields[6]) & _PF_SIGNALED))


def process_state(id: int) -> ProcessState | None:
    """Read the state of a process and its threads; None if it is gone.

    The thread that would speak may sleep because another has what it needs, an import's lock or the
    GIL, and waits for a disk, a processor or a debugger with it.
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
    """Tell whether a process sleeps and has done nothing between two looks."""
    return now is not None and now.letter == "S" and now == before


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
        """Its exit code, once it has ended, negative for a signal; None if that is unknown."""
        try:
            self.id = self._started(theirs).pid
        except BaseException:
            close_socket(self.socket)
            raise
        finally:
            close_socket(theirs)

    def _started(self, theirs: socket) -> subprocess.Popen[bytes]:
        """Start it on a thread of its own, which stays until its end and buries it.

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
        except ChildProcessError:  # by now it has ended: waitpid(2), of SIGCHLD
            code = None
        else:
            assert end is not None
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with self._burying:  # its number is its own until then
            process.wait()
            self.end.set_result(code)

    def kill(self) -> None:
        """End it at once: no instruction of it runs after this, though it may not be gone yet."""
        self._send(signal.SIGKILL)

    def tell_stacks(self) -> None:
        """Has it write to its log where its threads are, if it still can."""
        self._send(TELL_STACKS)

    def _send(self, each: signal.Signals) -> None:
        with self._burying, contextlib.suppress(ProcessLookupError):
            if not self.end.done():
                os.kill(self.id, each)

    def ended(self, seconds: float) -> bool:
        """Wait for its end for so long; whether it has ended."""
        return bool(wait([self.end], seconds).done)

    @property
    def crashed(self) -> bool:
        """Tell whether it ended by a fault of its own code, which would end this process as
        well.
        """
        code = self.end.result() if self.end.done() else None
        return code is not None and -code in _FAULTS

    def describe_end(self) -> str:
        """Describe how it ended, for an error."""
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
        """Remove the log, which is not needed any more."""
        with contextlib.suppress(OSError):
            self.log.unlink()


def first_environment() -> dict[str, str]:
    """The environment that the interpreter itself needs; all else goes over the socket, as
    secrets may.
    """
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
    """The places of what a worker imports at first where the interpreter would not look by
    itself.
    """
    known = {*site.getsitepackages(), site.getusersitepackages() if site.ENABLE_USER_SITE else ""}
    homes = []
    for name in _FIRST_IMPORTS:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin:
            inside = spec.submodule_search_locations is not None
            homes.append(str(Path(spec.origin).parents[1 if inside else 0]))
    return [home for home in dict.fromkeys(homes) if home not in known]


def _new_log(directory: str | None) -> Path:
    """Make the file of a log, and remove old ones from its directory."""
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
    """A directory that no other user can write to, the same for all processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"ckpipe-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        return folder
    return Path(tempfile.mkdtemp(prefix="ckpipe-"))  # somebody else has made that name theirs
