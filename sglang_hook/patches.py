"""Every SGLang seam, probed before it is wrapped. The two seam modules do what happens there.

Read in the wheels of 0.5.16 and 0.5.23. Nothing here raises into SGLang: an exception in dispatch
would kill the server.
"""

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_hook import settings as hook_settings
from sglang_hook.reading import CONTROLLER
from sglang_hook.settings import Settings

logger = logging.getLogger("sglang_hook")

SCHEDULER = "sglang.srt.managers.scheduler"
ENGINE = "sglang.srt.entrypoints.engine"
IO_STRUCT = "sglang.srt.managers.io_struct"

_MARK = "_dp_sidecar_wrapped"


class SeamMissing(Exception):
    """This SGLang has no such place to attach to; the message names it."""


@functools.cache
def settings() -> Settings:
    """The hook's settings, read once a process. Raises ConfigError or EndpointError."""
    return hook_settings.load(os.environ)


def install() -> None:
    """Attach to every seam whose module this process has loaded; safe to call again.

    SGLang calls its plugins after importing the module that a child process runs. The main process
    calls them first of all, so there the modules it will need are imported here.
    """
    settings()
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        raise SeamMissing("SGLANG_RUST_SERVER has no Python controller to hook; unset one of both")
    main = multiprocessing.parent_process() is None
    for name, attach in (
        (ENGINE, _attach_engine),
        (IO_STRUCT, _attach_io_struct),
        (CONTROLLER, _attach_controller),
        (SCHEDULER, _attach_scheduler),
    ):
        if main and name in (ENGINE, IO_STRUCT):
            __import__(name)
        if name in sys.modules:
            try:
                attach(sys.modules[name])
            except SeamMissing as error:
                logger.error("dp_sidecar: not attached, SGLang goes on without: %s", error)


def run_controller_process(*args: Any, **kwargs: Any) -> Any:
    """What the main process starts as the controller.

    SGLang loads its plugins there from 0.5.22 on only, so the child attaches by itself.
    """
    controller = __import__(CONTROLLER, fromlist=["_"])
    from sglang_hook.plugin import register

    register()
    return controller.run_data_parallel_controller_process(*args, **kwargs)


def _seam(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise SeamMissing(f"{getattr(owner, '__name__', owner)} has no {name}")
    return found


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace owner.name by make(original), once."""
    original = _seam(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)


# ---------------------------------------------------------------- main process


def _attach_engine(module: ModuleType) -> None:
    if _seam(module, "run_data_parallel_controller_process") is not run_controller_process:
        # Pickled by reference into the child, which imports this file.
        module.run_data_parallel_controller_process = run_controller_process  # type: ignore[attr-defined]


def _attach_io_struct(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def getitem(self: Any, i: int) -> Any:
            item = original(self, i)
            # SGLang drops the key from each request of a batch (sglang 37543).
            key = getattr(self, "routing_key", None)
            if key is not None and getattr(item, "routing_key", None) is None:
                item.routing_key = key[i % len(key)] if isinstance(key, list) and key else key
            return item

        return getitem

    _wrap(_seam(module, "GenerateReqInput"), "__getitem__", make)


# ---------------------------------------------------------- controller process


def _attach_controller(module: ModuleType) -> None:
    controller = _seam(module, "DataParallelController")
    for name in ("dispatch_batch_generate", "dispatch_batch_embedding", "round_robin_scheduler"):
        _seam(controller, name)
    _seam(module, "sock_send")
    tokenized = (
        _seam(module, "TokenizedGenerateReqInput"),
        _seam(module, "TokenizedEmbeddingReqInput"),
    )
    _wrap(module, "sock_send", lambda original: _counting_send(original, tokenized))
    _wrap(controller, "__init__", _hooked_init)
    _wrap(controller, "dispatch_batch_generate", _planned_batch)
    _wrap(controller, "dispatch_batch_embedding", _planned_batch)


def _counting_send(original: Callable[..., Any], tokenized: tuple[type, ...]) -> Callable[..., Any]:
    from sglang_hook.controller_seam import sent

    def sock_send(socket: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(socket, obj, *args, **kwargs)
        if isinstance(obj, tokenized):
            sent(socket, obj)
        return result

    return sock_send


def _hooked_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            from sglang_hook.controller_seam import ControllerSeam

            ControllerSeam(self, settings()).attach()
        except Exception:
            logger.exception("dp_sidecar: controller not attached, SGLang dispatches without")

    return init


def _planned_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        seam = self.__dict__.get("_dp_sidecar")
        if seam is None:
            return original(self, batch, *args, **kwargs)
        with seam.planned(batch):
            return original(self, batch, *args, **kwargs)

    return dispatch_batch


# ----------------------------------------------------------- scheduler process


def _attach_scheduler(module: ModuleType) -> None:
    scheduler = _seam(module, "Scheduler")
    _seam(scheduler, "publish_load_snapshot")
    _wrap(scheduler, "process_input_requests", _reporting)
    if hasattr(scheduler, "flush_cache"):  # loads are worth reporting without it
        # On the class: a scheduler hands its bound method out while it is made, to what answers
        # /flush_cache and to weight updates.
        _wrap(scheduler, "flush_cache", _counting_flush)


def _reporting(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_input_requests(self: Any, recv_reqs: Any) -> Any:
        try:
            return original(self, recv_reqs)
        finally:
            seam = self.__dict__.get("_dp_sidecar", _MARK)
            if seam is _MARK:
                seam = self._dp_sidecar = _scheduler_seam(self)
            if seam is not None:
                seam.step(recv_reqs)

    return process_input_requests


def _counting_flush(original: Callable[..., Any]) -> Callable[..., Any]:
    def flush_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        emptied = original(self, *args, **kwargs)
        seam = self.__dict__.get("_dp_sidecar")
        if seam is not None:
            seam.flushed(emptied)
        return emptied

    return flush_cache


def _scheduler_seam(scheduler: Any) -> Any:
    """The reporting side of a rank-zero scheduler; None in the other processes of its rank."""
    if getattr(scheduler, "load_snapshot_writer", None) is None:
        return None
    try:
        from sglang_hook.scheduler_seam import SchedulerSeam

        return SchedulerSeam(scheduler, settings())
    except Exception:
        logger.exception("dp_sidecar: scheduler not attached, its load is not reported")
        return None
