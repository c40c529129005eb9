"""Where the files of an input stand, and what of this machine is left out of sight."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from sidecar import catalog, config

_USERS: tuple[Any, ...] = (catalog, config)


@functools.cache
def _directory() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dpsfuzz")


def written(name: str, data: bytes) -> str:
    """Path of a file (mode 0600) of that name with these bytes; the last of that name is gone."""
    path = os.path.join(_directory().name, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    return path


@contextlib.contextmanager
def nothing_installed() -> Iterator[None]:
    """No package offers a policy: to look for some takes longer than all the rest."""
    before = catalog.offered
    for module in _USERS:
        module.offered = dict
    try:
        yield
    finally:
        for module in _USERS:
            module.offered = before
