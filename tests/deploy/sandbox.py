"""`python -m tests.deploy.sandbox CALLS COMMAND ...`: a command under a unit's restrictions.

CALLS: names of the system calls that it may make, with commas; any other fails with EPERM. The
command has no capability, even as root, may gain none, and may not make writable memory executable.
This is the part of systemd's sandbox that can break a program and needs no systemd as process 1.
"""

import ctypes
import errno
import os
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_CAPBSET_DROP = 38, 65, 24
LAST_CAPABILITY = 40
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO


def main() -> None:
    names, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    libc.prctl(PR_SET_MDWE, 1, 0, 0, 0)  # Linux 6.3; systemd has a filter for older ones
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(DENY))
    for name in names.split(","):
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # not one of this architecture
            seccomp.seccomp_rule_add(context, ALLOW, number, 0)
    assert seccomp.seccomp_load(context) == 0
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
