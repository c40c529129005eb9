"""How a routing key is called where people can see it: by a keyed hash, which tells nobody the key.

Without the secret nobody can try keys until one fits; with it, `of` finds the name of a known key.
"""

import hashlib
import os
import stat
from pathlib import Path

from sidecar.errors import ConfigError

SECRET_BYTES = 32
NAME_BYTES = 8


class KeyHash:
    """Names keys. secret: SECRET_BYTES of it; one of its own if none is given."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = os.urandom(SECRET_BYTES) if secret is None else secret

    def of(self, key: bytes) -> str:
        """16 hexadecimal digits."""
        return hashlib.blake2b(key, key=self._secret, digest_size=NAME_BYTES).hexdigest()


def secret_in(path: str | os.PathLike[str]) -> bytes:
    """The secret kept in a file of mode 0600, which is made if it is missing.

    Raises ConfigError if it cannot be read or made, or is not one.
    """
    file = Path(path)
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(os.urandom(SECRET_BYTES))
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    try:
        mode = file.stat().st_mode
        secret = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{file}: others may read it, and so try keys; chmod 600 it")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{file}: has {len(secret)} bytes, a secret has {SECRET_BYTES}; without the file a new "
            "one is made"
        )
    return secret
