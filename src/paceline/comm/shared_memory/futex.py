"""Words in shared memory that processes wait on: the kernel puts a waiter to sleep until another has moved the word.

A word only ever counts up. Who moves it makes everything that it wrote before visible to whoever sees the word moved:

- `advance` is one system call, FUTEX_WAKE_OP: the kernel adds to the word by an atomic instruction that earlier writes
  cannot come after (on x86-64 a locked one, on arm64 `stlxr`, a store with release), then wakes who waits there.
- A reader looks at the word with a plain load of 32 aligned bits, which is never torn. On x86-64 later loads do not
  overtake it. Elsewhere, arm64 among them, they might, so `seen` asks the kernel about the word once more: on its way
  to the answer it passes a full barrier (`futex_hb_waiters_inc`), and only then is read what the word announces.

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

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_EVERYONE = 2**31 - 1
_ADD_SHIFT, _OP_ADD, _CMP_NEVER = 12, 1, 2
"""In what FUTEX_WAKE_OP is asked: operation 1 adds, comparison 2 is "less than", which with 0 hardly ever holds."""
_LOADS_STAY_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "s390x")
_LONGEST_NAP_S = 0.002
WORD_BYTES = 4


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> ctypes._NamedFuncPointer | None:
    """What asks the kernel; None where it is not known how. It lets go of Python's lock while it waits."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) != 8 or platform.machine() not in _NUMBERS:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


class FutexWords:
    """The 32-bit words of a piece of shared memory: each may be moved by one process at a time, and read by all."""

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        whole = memoryview(memory)
        self._words = whole[offset : offset + count * WORD_BYTES].cast("I")
        # Its address, for the kernel; the object that tells it would keep the memory from being let go of.
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        whole.release()
        self._call = _system_call()
        number = _NUMBERS.get(platform.machine(), 0)
        self._number, self._op = ctypes.c_long(number), ctypes.c_int(_WAKE_OP)
        self._everyone, self._none = ctypes.c_int(_EVERYONE), ctypes.c_long(0)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def advance(self, index: int, by: int = 1) -> None:
        """Adds to a word, after all that was written before, and wakes who waits for it."""
        if self._call is None:
            self._words[index] = (self._words[index] + by) % 2**32
            return
        address = ctypes.c_void_p(self._base + index * WORD_BYTES)
        how = ctypes.c_int(_OP_ADD << 28 | _CMP_NEVER << 24 | by << _ADD_SHIFT)
        if self._call(self._number, address, self._op, self._everyone, self._none, address, how) < 0:
            raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")

    def reached(self, index: int, value: int) -> bool:
        """Whether a word has come to a value, or past it; words may go round, values are far less than 2³¹ apart."""
        return (self._words[index] - value) % 2**32 < 2**31

    def seen(self, index: int) -> None:
        """Comes between seeing a word moved and reading what that announces."""
        if not _LOADS_STAY_IN_ORDER:
            self.sleep(index, (self._words[index] + 1) % 2**32, 0.0)

    def sleep(self, index: int, value: int, timeout_s: float) -> None:
        """Sleeps until the word is moved from a value, some time has passed, or, now and then, for no reason."""
        if self._call is None:
            time.sleep(min(timeout_s, _LONGEST_NAP_S))
            return
        nap = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        address = ctypes.c_void_p(self._base + index * WORD_BYTES)
        if self._call(self._number, address, ctypes.c_int(_WAIT), ctypes.c_uint(value), ctypes.byref(nap)) < 0:
            problem = ctypes.get_errno()
            if problem not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(problem, f"futex: {os.strerror(problem)}")

    def release(self) -> None:
        """Lets go of the memory."""
        self._words.release()
