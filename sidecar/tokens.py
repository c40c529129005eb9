"""The token that opens the control verbs over TCP."""

import os
import stat
from pathlib import Path

from sidecar.errors import ConfigError

MIN_TOKEN_CHARS = 16


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file that nobody else can read. Raises ConfigError."""
    try:
        mode = os.stat(path).st_mode
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not ASCII text"
        raise ConfigError(f"admin.token_file: {path}: {reason}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"admin.token_file: {path}: others may read it; chmod 600 it")
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"admin.token_file: {path}: the token has {len(token)} characters; at least "
            f"{MIN_TOKEN_CHARS} are needed, without spaces"
        )
    return token
