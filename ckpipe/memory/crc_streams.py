"""CRC-32C of many parts of memory in one call, without the interpreter's lock.

Theory. A save needs a checksum of every mebibyte. A call for each takes and returns the lock a
thousand times for a gibibyte, and beside a loop of Python every return waits for the interpreter's
switch interval, 5 ms: checksums that take 50 ms of a processor then take most of a second. No
package computes several in one call, so this loop is machine code
(:mod:`ckpipe.memory.machine_code`).

x86-64 processors with SSE4.2 have an instruction for this polynomial. It takes three cycles, and
another can begin in each; so a large part is cut in four, whose sums are computed side by side and
combined afterwards (V. Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32
Instruction", Intel, 2011). That is 8 bytes a cycle, more than memory brings.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpipe.memory.machine_code import loaded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STREAMS = 4
"""How many sums are computed side by side of a large part."""

LEAST_BYTES = 128 << 10
"""A smaller part is not cut: combining sums costs Python what that saves the processor."""

Compute = Callable[["NDArray[np.int64]", "NDArray[np.int64]"], "NDArray[np.uint32]"]
"""Computes sums of parts of memory.

The parts are given by the addresses at which each begins and ends. The result has
:data:`STREAMS` sums for each: those of the pieces that it was cut in, which are all of
:func:`stream_bytes` but for the last, which has the rest.
"""

# On entry rdi is the address, rsi and rdx point to beginnings and ends, rcx to where the sums go,
# and r8 is the number of parts. Then r9 and r12 are where the first and third stream are, r13 is
# the size of a stream, r14 the words left of each, r10 the bytes left of the last behind those.
_INSTRUCTIONS = (
    "f3 0f 1e fa",  #              endbr64
    "53",  #                       push rbx
    "55",  #                       push rbp
    "41 54",  #                    push r12
    "41 55",  #                    push r13
    "41 56",  #                    push r14
    "4d 85 c0",  #           part: test r8, r8
    "0f 84 c5 00 00 00",  #        jz done
    "4c 8b 0e",  #                 mov r9, [rsi]
    "4c 8b 12",  #                 mov r10, [rdx]
    "4d 29 ca",  #                 sub r10, r9
    "49 01 f9",  #                 add r9, rdi
    "45 31 f6",  #                 xor r14d, r14d
    "49 81 fa 00 00 02 00",  #     cmp r10, 131072
    "72 07",  #                    jb cut
    "4d 89 d6",  #                 mov r14, r10
    "49 c1 ee 05",  #              shr r14, 5
    "4e 8d 2c f5 00 00 00 00",  # cut: lea r13, [r14 * 8]
    "4f 8d 24 69",  #              lea r12, [r9 + r13 * 2]
    "4c 89 e8",  #                 mov rax, r13
    "48 c1 e0 02",  #              shl rax, 2
    "49 29 c2",  #                 sub r10, rax
    "b8 ff ff ff ff",  #           mov eax, 0xffffffff
    "41 89 c3",  #                 mov r11d, eax
    "89 c3",  #                    mov ebx, eax
    "89 c5",  #                    mov ebp, eax
    "eb 26",  #                    jmp check
    "f2 49 0f 38 f1 01",  # words: crc32 rax, qword [r9]
    "f2 4f 0f 38 f1 1c 29",  #     crc32 r11, qword [r9 + r13]
    "f2 49 0f 38 f1 1c 24",  #     crc32 rbx, qword [r12]
    "f2 4b 0f 38 f1 2c 2c",  #     crc32 rbp, qword [r12 + r13]
    "49 83 c1 08",  #              add r9, 8
    "49 83 c4 08",  #              add r12, 8
    "49 ff ce",  #                 dec r14
    "4d 85 f6",  #          check: test r14, r14
    "75 d5",  #                    jnz words
    "4d 01 ec",  #                 add r12, r13
    "49 83 fa 08",  #        word: cmp r10, 8
    "72 11",  #                    jb byte
    "f2 49 0f 38 f1 2c 24",  #     crc32 rbp, qword [r12]
    "49 83 c4 08",  #              add r12, 8
    "49 83 ea 08",  #              sub r10, 8
    "eb e9",  #                    jmp word
    "4d 85 d2",  #           byte: test r10, r10
    "74 0f",  #                    jz store
    "f2 41 0f 38 f0 2c 24",  #     crc32 ebp, byte [r12]
    "49 ff c4",  #                 inc r12
    "49 ff ca",  #                 dec r10
    "eb ec",  #                    jmp byte
    "f7 d0",  #             store: not eax
    "41 f7 d3",  #                 not r11d
    "f7 d3",  #                    not ebx
    "f7 d5",  #                    not ebp
    "89 01",  #                    mov [rcx], eax
    "44 89 59 04",  #              mov [rcx + 4], r11d
    "89 59 08",  #                 mov [rcx + 8], ebx
    "89 69 0c",  #                 mov [rcx + 12], ebp
    "48 83 c6 08",  #              add rsi, 8
    "48 83 c2 08",  #              add rdx, 8
    "48 83 c1 10",  #              add rcx, 16
    "49 ff c8",  #                 dec r8
    "e9 32 ff ff ff",  #           jmp part
    "41 5e",  #              done: pop r14
    "41 5d",  #                    pop r13
    "41 5c",  #                    pop r12
    "5d",  #                       pop rbp
    "5b",  #                       pop rbx
    "c3",  #                       ret
)


def stream_bytes(nbytes: int) -> int:
    """The size of all pieces but the last that a part is cut in; nothing if it is not cut."""
    return nbytes // (8 * STREAMS) * 8 if nbytes >= LEAST_BYTES else 0


@functools.cache
def crc_streams() -> Compute | None:
    """What computes the sums; None where there can be no such thing."""
    address = loaded(_INSTRUCTIONS, needs="sse4_2")
    if address is None:
        return None
    function = _PROTOTYPE(address)

    # Imported here, since who checksums nothing has no other use for it, and it takes a while.
    import numpy as np

    def compute(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint32]:
        count = len(begins)
        found = np.empty(STREAMS * count, np.uint32)
        function(0, *(each.ctypes.data for each in (begins, ends, found)), count)
        return found

    return compute


_PROTOTYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)

__all__ = ["LEAST_BYTES", "STREAMS", "Compute", "crc_streams", "stream_bytes"]
