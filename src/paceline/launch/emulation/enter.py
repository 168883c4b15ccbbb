"""Becomes a program in the namespaces that it was handed: `python -I -S enter.py PARENT FD,FD -- PROGRAM ARGS`.

A script of its own, without a single import of ours, so that it is there in 15 ms. The program ends with its parent,
even if that is killed without a chance to clean up.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel to end us with our parent, enters the namespaces, and becomes the program."""
    parent, descriptors, _, *program = sys.argv[1:]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends us without a word; who ignores it goes on to do so.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # It died before we asked.
        sys.exit(1)
    here = os.getcwd()  # noqa: PTH109
    for descriptor in map(int, descriptors.split(",")):
        if libc.setns(descriptor, 0) != 0:
            sys.exit(f"cannot enter an emulated host: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)
    os.chdir(here)  # A view of the file system begins at its root.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The parent waits for signals, and has them blocked.
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
