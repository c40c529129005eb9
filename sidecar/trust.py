"""Who could put another socket in the place of one: the same rule for sidecar and hook.

Whoever may write to a directory may replace the sockets in it. A group that may is the operator's
choice; all users of the machine are nobody's.
"""

import os
import stat


def fault(path: str, *, meet: bool = False) -> str:
    """Why any user of this machine could stand at the socket `path`; "": none that we know.

    meet: about to connect to what lies there, not to bind. What cannot be looked at is no fault:
    nobody gets in there either.
    """
    directory = os.path.dirname(path)
    try:
        status = os.stat(directory)
        if not status.st_mode & stat.S_IWOTH:
            return ""
        if not status.st_mode & stat.S_ISVTX:
            return "" if _volume(directory, status) else _open(directory, status)
        # As in /tmp nobody removes what is another's, but anybody may have been there first.
        owner = os.lstat(path).st_uid if meet else 0
    except OSError:
        return ""
    if owner in (0, os.geteuid()):
        return ""
    return f"{path}: belongs to user {owner}, in a directory that all users may write to"


def _volume(directory: str, status: os.stat_result) -> bool:
    """Whether it is what a container runtime mounts: root's, mode 0777 (Kubernetes' emptyDir).

    Who else has it mounted, the operator has decided.
    """
    return status.st_uid == 0 and os.path.ismount(directory)


def _open(directory: str, status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"{directory}: mode {mode:04o}, any user can put another socket there; chmod 700"
