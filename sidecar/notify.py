"""sd_notify(3): tells systemd what this process is about, if systemd asked for it."""

import os
import socket


def notify(*lines: str) -> bool:
    """Send `READY=1`, `MAINPID=...`, `STOPPING=1` and the like; False if there is nobody to tell.

    One datagram to $NOTIFY_SOCKET: a path, or with a leading @ an abstract name. Never raises: a
    supervisor that does not listen must not stop us.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    if address[0] == "@":
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.connect(address)
            sender.send("\n".join(lines).encode())
    except OSError:
        return False
    return True
