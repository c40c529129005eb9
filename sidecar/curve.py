"""CURVE keys, as hook and sidecar read them from files: Z85 text, one key a file or a line.

A key that is wrong in any way is never shown: it may be a secret with a typing error.
"""

import os
import stat

import zmq
from zmq.utils import z85

from sidecar.errors import ConfigError

KEY_CHARS = 40  # 32 bytes in Z85, rfc.zeromq.org/spec/32
MAX_CLIENTS = 4096
# A line of a file of public keys has room for a comment.
MAX_FILE_BYTES = MAX_CLIENTS * 256
_OTHERS, _GROUP = stat.S_IRWXO, stat.S_IRWXG
_GROUP_CHANGES = stat.S_IWGRP | stat.S_IXGRP


class Pair:
    """A key pair of this process, as Z85. Its secret shows in no log: it has no useful repr."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.public = zmq.curve_public(secret)

    def __repr__(self) -> str:
        return "Pair(...)"


class ClientKeys:
    """What a client needs: its own pair and the server's public key."""

    def __init__(self, own: Pair, server: bytes) -> None:
        self.own = own
        self.server = server

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Make the socket's next connection a CURVE one."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


class ServerKeys:
    """What the sidecar needs: its own pair and the raw public keys that may connect."""

    def __init__(self, own: Pair, clients: frozenset[bytes]) -> None:
        self.own = own
        self.clients = clients


def parse_key(text: str, name: str) -> bytes:
    """A key as Z85 bytes. Raises ConfigError, which begins with `name` and does not show it."""
    if len(text) != KEY_CHARS:
        raise ConfigError(f"{name}: a CURVE key has {KEY_CHARS} characters, this has {len(text)}")
    key = text.encode()
    try:
        whole = len(z85.decode(key)) == 32 and z85.encode(z85.decode(key)) == key
    except Exception:  # noqa: BLE001 - pyzmq raises what its arithmetic happens to meet
        whole = False
    if not whole:
        raise ConfigError(f"{name}: is not a CURVE key: not Z85 text as `keygen` writes it")
    return key


def read_secret(path: str, name: str) -> Pair:
    """The pair of a secret key file. Raises ConfigError.

    The file may be read by its owner only. One of root's may be read by its group too: Kubernetes
    mounts secrets so for a process that is not root. PostgreSQL has the same rule for its keys.
    """
    where = f"{name}: {path}"
    if not zmq.has("curve"):
        raise ConfigError(f"{name}: this libzmq was built without CURVE")
    text, status = _read(path, where, 256)
    shared = status.st_mode & (_OTHERS | (_GROUP_CHANGES if status.st_uid == 0 else _GROUP))
    if shared:
        raise ConfigError(
            f"{where}: holds a secret, but has mode {stat.S_IMODE(status.st_mode):04o}: "
            "other users must not read it, chmod 600"
        )
    key = parse_key(text.strip(), where)
    try:
        return Pair(key)
    except zmq.ZMQError:
        raise ConfigError(f"{where}: is not a CURVE secret key") from None


def read_clients(path: str, name: str) -> frozenset[bytes]:
    """The raw public keys of a file, one a line, `#` begins a comment. Raises ConfigError."""
    text, _ = _read(path, f"{name}: {path}", MAX_FILE_BYTES)
    keys = set()
    for number, line in enumerate(text.splitlines(), 1):
        # A key may hold a `#`, but no blank; none begins with `#`: that block would be too large.
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 1 and not words[1].startswith("#"):
            raise ConfigError(
                f"{name}: {path}, line {number}: one key a line, then # and a comment"
            )
        keys.add(z85.decode(parse_key(words[0], f"{name}: {path}, line {number}")))
    if not 0 < len(keys) <= MAX_CLIENTS:
        raise ConfigError(
            f"{name}: {path}: holds {len(keys)} keys; there must be 1 to {MAX_CLIENTS}"
        )
    return frozenset(keys)


def server_keys(secret_file: str, clients_file: str) -> ServerKeys | None:
    """The sidecar's keys; None: it has none. Raises ConfigError, which names the setting."""
    secret, clients = "serve.curve_secret_key_file", "serve.curve_client_keys_file"
    if not secret_file and not clients_file:
        return None
    if not secret_file or not clients_file:
        missing, given = (clients, secret) if secret_file else (secret, clients)
        raise ConfigError(f"{missing}: is needed with {given}; `keygen` makes both")
    return ServerKeys(read_secret(secret_file, secret), read_clients(clients_file, clients))


def _read(path: str, where: str, bound: int) -> tuple[str, os.stat_result]:
    try:
        # NONBLOCK: a pipe in its place must not hold up the start.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{where}: is not a file")
            data = os.read(fd, bound + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > bound:
        raise ConfigError(f"{where}: has more than {bound} bytes; is it a file of keys?")
    try:
        return data.decode("ascii"), status
    except UnicodeDecodeError:
        raise ConfigError(
            f"{where}: is not a file of keys: it has bytes that no text has"
        ) from None
