"""`sglang-dp-sidecar keygen`: the two key pairs of a deployment, written once."""

import os
from pathlib import Path

import zmq

from sidecar.errors import ConfigError

# Characters that need no quotes in a shell, a systemd unit, a .env file or YAML.
_PLAIN = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-+/=:@^")
_WORD = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def keygen(directory: str) -> str:
    """Write sidecar.key_secret, sidecar.key, hook.key_secret, hook.key; return what goes where.

    Secrets have mode 0600. Raises ConfigError; then no file was made, and none was touched.
    """
    if not zmq.has("curve"):
        raise ConfigError("keygen: this libzmq was built without CURVE")
    folder = Path(directory)
    server, hook = _plain_pair(), zmq.curve_keypair()
    files = {
        folder / "sidecar.key_secret": server[1],
        folder / "sidecar.key": server[0],
        folder / "hook.key_secret": hook[1],
        folder / "hook.key": hook[0],
    }
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, key in files.items():
            fd = _create(path)
            made.append(path)
            with os.fdopen(fd, "wb") as file:
                file.write(key + b"\n")
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            text = "is there already and is kept; choose another directory, or remove it"
        else:
            text = error.strerror or str(error)
        raise ConfigError(f"keygen: {error.filename or directory}: {text}") from None
    return _advice(folder.absolute(), server[0].decode())


def _plain_pair() -> tuple[bytes, bytes]:
    """A pair whose public key can be pasted anywhere: one of some 6,000 is such, found in a second.

    That leaves 243 of the 255 bits that a CURVE key has to guess.
    """
    while True:
        public, secret = zmq.curve_keypair()
        if _PLAIN.issuperset(public) and _WORD.issuperset((public[0], public[-1])):
            return public, secret


def _create(path: Path) -> int:
    mode = 0o600 if path.suffix == ".key_secret" else 0o644
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _advice(folder: Path, server: str) -> str:
    return f"""\
For the sidecar (sidecar.key_secret must be on its machine only):
  --curve-secret-key-file={folder}/sidecar.key_secret
  --curve-client-keys-file={folder}/hook.key
For SGLang on every node that connects over TCP (copy hook.key_secret there, mode 0600):
  DP_SIDECAR_CURVE_SERVER_KEY={server}
  DP_SIDECAR_CURVE_SECRET_KEY_FILE={folder}/hook.key_secret
"""
