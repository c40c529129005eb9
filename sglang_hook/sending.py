"""Counts the requests that a controller sends to its workers, whatever chose their ranks.

From 0.5.15 on they all go through one function of the controller's module; before, the controller
pickles them onto each worker's socket.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from sglang_hook.wrapping import Function, seam, wrap

Listener = Callable[[Any, Any], None]
"""Takes the socket and the request."""

LISTENERS: list[Listener] = []
"""Those of this process: one, but for several engines under one Ray driver."""


def tokenized(module: Any) -> tuple[type, ...]:
    """SGLang's types of the requests that go to one rank. Raises SeamMissing."""
    return (
        seam(module, "TokenizedGenerateReqInput"),
        seam(module, "TokenizedEmbeddingReqInput"),
    )


def counting_send(original: Function, module: Any) -> Function:
    """SGLang's `sock_send`, which tells every listener."""
    kinds = tokenized(module)

    def sock_send(socket: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(socket, obj, *args, **kwargs)
        if isinstance(obj, kinds):
            for listener in LISTENERS:
                listener(socket, obj)
        return result

    return sock_send


def count_at_sockets(workers: Iterable[Any], kinds: tuple[type, ...], listener: Listener) -> None:
    """Let each worker's socket tell the listener. Raises SeamMissing."""

    def make(worker: Any, original: Function) -> Function:
        def send_pyobj(obj: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(obj, *args, **kwargs)
            if isinstance(obj, kinds):
                listener(worker, obj)
            return result

        return send_pyobj

    for worker in workers:
        if worker is not None:
            wrap(worker, "send_pyobj", functools.partial(make, worker))
