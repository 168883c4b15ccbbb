"""Futexes: 32-bit words in shared memory that processes wait on; the kernel wakes a waiter when a word changes.

A word only counts up. The writer of a word makes all its earlier writes visible to a process that sees the new value:

- `add` is one system call, FUTEX_WAKE_OP. The kernel adds to the word with an atomic instruction that earlier writes
  cannot be moved after (a locked instruction on x86-64; `stlxr`, a store with release, on arm64), then wakes waiters.
- A reader loads the word with a plain load of 32 aligned bits, which is never torn. On x86-64 later loads cannot be
  moved before it. On other processors such as arm64 they can, so `acquire` makes a system call on the word: the kernel
  passes a full barrier (`futex_hb_waiters_inc`) before it returns, and only then does the reader read the shared data.

Source: Drepper, "Futexes Are Tricky", 2011; futex(2); Documentation/memory-barriers.txt of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ALL_WAITERS = 2**31 - 1
_ADD_SHIFT, _OP_ADD, _CMP_NEVER = 12, 1, 2
"""Encoding of FUTEX_WAKE_OP: operation 1 adds; comparison 2 is "less than", which with 0 is practically never true."""
_LOADS_STAY_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "s390x")
_LONGEST_SLEEP_S = 0.002
"""Longest sleep between two looks at a word where futexes are not available."""
WORD_BYTES = 4


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> ctypes._NamedFuncPointer | None:
    """Return libc's `syscall`, which releases Python's GIL; None on platforms without a known futex call."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) != 8 or platform.machine() not in _SYSCALL_NUMBERS:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


class FutexWords:
    """32-bit words of a piece of shared memory. Each is written by one process at a time, and read by all."""

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        whole = memoryview(memory)
        self._words = whole[offset : offset + count * WORD_BYTES].cast("I")
        # Only the address is kept: a reference to the ctypes object would prevent unmapping the memory.
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        whole.release()
        self._call = _system_call()
        number = _SYSCALL_NUMBERS.get(platform.machine(), 0)
        self._number, self._op = ctypes.c_long(number), ctypes.c_int(_WAKE_OP)
        self._all_waiters, self._none = ctypes.c_int(_ALL_WAITERS), ctypes.c_long(0)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def add(self, index: int, by: int = 1) -> None:
        """Add to a word, with release semantics for all earlier writes, and wake all its waiters."""
        if self._call is None:
            self._words[index] = (self._words[index] + by) % 2**32
            return
        address = ctypes.c_void_p(self._base + index * WORD_BYTES)
        how = ctypes.c_int(_OP_ADD << 28 | _CMP_NEVER << 24 | by << _ADD_SHIFT)
        if self._call(self._number, address, self._op, self._all_waiters, self._none, address, how) < 0:
            raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")

    def has_reached(self, index: int, value: int) -> bool:
        """Return whether a word is at or past a value. Words may overflow; values differ by far less than 2³¹."""
        return (self._words[index] - value) % 2**32 < 2**31

    def acquire(self, index: int) -> None:
        """Order later reads after the load of a word; call it between seeing a new value and reading shared data."""
        if not _LOADS_STAY_IN_ORDER:
            self.wait(index, (self._words[index] + 1) % 2**32, 0.0)

    def wait(self, index: int, value: int, timeout_s: float) -> None:
        """Sleep while the word has a value, for at most `timeout_s`. Spurious wake-ups are possible."""
        if self._call is None:
            time.sleep(min(timeout_s, _LONGEST_SLEEP_S))
            return
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        address = ctypes.c_void_p(self._base + index * WORD_BYTES)
        if self._call(self._number, address, ctypes.c_int(_WAIT), ctypes.c_uint(value), ctypes.byref(timeout)) < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, f"futex: {os.strerror(code)}")

    def release(self) -> None:
        """Release the view of the memory, so that it can be unmapped."""
        self._words.release()
