"""Functions given to the processor as they are: where no library has them, and no compiler is.

They keep to the C calling convention (System V ABI, AMD64 supplement), call nothing, and lie in
memory of their own that may be executed and no longer written. Whoever has one also has another
way, for other processors and for systems that allow no such memory.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_kept: list[mmap.mmap] = []
"""What holds code, for as long as the process lives: it may be called at any time."""


def loaded(instructions: Iterable[str], *, needs: str = "") -> int | None:
    """Where a function of x86-64 begins in memory; None if it cannot be had here.

    Args:
        instructions: Each instruction in hexadecimal.
        needs: What the processor must have that not every x86-64 has, as Linux names it in the
            flags of ``/proc/cpuinfo``, several with spaces between; read only if given.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return None
    if needs and not _processor_flags().issuperset(needs.split()):
        return None
    try:
        return _executable(bytes.fromhex("".join(instructions)))
    except OSError:  # a policy of the system, such as SELinux's, does not allow it
        return None


def _processor_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, flags = line.partition(":")
                if name.strip() == "flags":
                    return set(flags.split())
    except OSError:
        pass
    return set()


def _executable(code: bytes) -> int:
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "no memory to execute")
    _kept.append(memory)
    return address


__all__ = ["loaded"]
