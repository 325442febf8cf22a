"""Run one command as a given user, never outliving the process that asked for it.

A script, not a module to import: `python -I -S launch.py OWNER_PID UID GID COMMAND [ARGS...]`. It becomes COMMAND.

This is done in a small interpreter of its own, between fork and exec of the server, for three reasons: the kernel
forgets a parent-death signal when the user changes, so it must be set after that; running Python between fork and
exec inside a threaded process (`preexec_fn`) can deadlock; and it is still root that opens the interpreter, which the
other user may be unable to reach.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    owner_pid, uid, gid, *command = sys.argv[1:]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    if sys.platform == "linux":
        # SIGINT is Postgres's "fast shutdown": sessions are closed and the data directory is left clean.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != int(owner_pid):
        sys.exit("the process that wanted this server is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
