"""Enter namespaces and execute a program: `python -I -S enter.py PARENT FD,FD -- PROGRAM ARGS`.

This is a separate script that imports nothing from Paceline, so that it starts in 15 ms. The kernel kills the program
when its parent ends, even if the parent is killed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind the life of this process to its parent, enter the namespaces, and execute the program."""
    parent, descriptors, _, *program = sys.argv[1:]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently. An ignored SIGINT stays ignored.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # The parent ended before prctl.
        sys.exit(1)
    here = os.getcwd()  # noqa: PTH109
    for descriptor in map(int, descriptors.split(",")):
        if libc.setns(descriptor, 0) != 0:
            sys.exit(f"cannot enter an emulated host: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)
    os.chdir(here)  # Entering a mount namespace changes to its root folder.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The parent blocks signals, which the child inherits.
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
