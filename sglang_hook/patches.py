"""Every SGLang seam, probed before it is wrapped. The two seam modules do what happens there.

Read in the wheels of 0.5.12 to 0.5.23. Nothing here raises into SGLang: an exception in dispatch
would kill the server.
"""

import functools
import inspect
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_hook import settings as hook_settings
from sglang_hook.front import (
    ENGINE,
    IO_STRUCT,
    TOKENIZERS,
    attach_engine,
    attach_io_struct,
    attach_tokenizers,
)
from sglang_hook.reading import CONTROLLER
from sglang_hook.settings import Settings
from sglang_hook.wrapping import Function, SeamMissing, seam, wrap, wrap_if_there

logger = logging.getLogger("sglang_hook")

SCHEDULER = "sglang.srt.managers.scheduler"

_UNSET = object()


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
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        raise SeamMissing("SGLANG_RUST_SERVER has no Python controller to hook; unset one of both")
    main = multiprocessing.parent_process() is None
    for name, attach in (
        (ENGINE, attach_engine),
        (IO_STRUCT, attach_io_struct),
        (TOKENIZERS, attach_tokenizers),
        (CONTROLLER, _attach_controller),
        (SCHEDULER, _attach_scheduler),
    ):
        _attach(name, attach, needed=main and name in (ENGINE, IO_STRUCT, TOKENIZERS))


def _attach(name: str, attach: Callable[[ModuleType], None], *, needed: bool) -> None:
    """Attach to the module if it is loaded; `needed`: load it. Says what is missing."""
    try:
        if needed:
            __import__(name)
        if name in sys.modules:
            attach(sys.modules[name])
    except (SeamMissing, ImportError) as error:
        logger.error("dp_sidecar: not attached, SGLang goes on without: %s", error)
    except Exception:
        # Another kind of thing than in the releases that were read: the other seams count.
        logger.exception("dp_sidecar: not attached to %s, SGLang goes on without", name)


# ---------------------------------------------------------- controller process


def _attach_controller(module: ModuleType) -> None:
    from sglang_hook.sending import counting_send, tokenized

    controller = seam(module, "DataParallelController")
    tokenized(module)
    if hasattr(module, "sock_send"):  # before 0.5.15 each socket sends, see controller_seam
        wrap(module, "sock_send", lambda original: counting_send(original, module))
    elif "send_pyobj" not in _names_in(seam(controller, "round_robin_scheduler")):
        raise SeamMissing("the controller sends to its workers in a way unknown to this hook")
    wrap(controller, "__init__", _hooked_init)
    for name in ("dispatch_batch_generate", "dispatch_batch_embedding"):
        wrap_if_there(controller, name, _planned_batch, "one query for each request of a batch")


def _names_in(function: Function) -> tuple[str, ...]:
    """Names that the code of a function uses, whoever wrapped it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_names if code is not None else ()


def _hooked_init(original: Function) -> Function:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            from sglang_hook.controller_seam import ControllerSeam

            ControllerSeam(self, settings()).attach()
        except SeamMissing as error:
            logger.error("dp_sidecar: not attached, SGLang goes on without: %s", error)
        except Exception:
            logger.exception("dp_sidecar: controller not attached, SGLang dispatches without")

    return init


def _planned_batch(original: Function) -> Function:
    def dispatch_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.__dict__.get("_dp_sidecar")
        if ours is None:
            return original(self, batch, *args, **kwargs)
        with ours.planned(batch):
            return original(self, batch, *args, **kwargs)

    return dispatch_batch


# ----------------------------------------------------------- scheduler process


def _attach_scheduler(module: ModuleType) -> None:
    scheduler = seam(module, "Scheduler")
    wrap(scheduler, "process_input_requests", _reporting)
    if hasattr(scheduler, "flush_cache"):  # loads are worth reporting without it
        # On the class: a scheduler hands its bound method out while it is made, to what answers
        # /flush_cache and to weight updates.
        wrap(scheduler, "flush_cache", _counting_flush)


def _reporting(original: Function) -> Function:
    def process_input_requests(self: Any, recv_reqs: Any) -> Any:
        try:
            return original(self, recv_reqs)
        finally:
            ours = self.__dict__.get("_dp_sidecar", _UNSET)
            if ours is _UNSET:
                ours = self._dp_sidecar = _scheduler_seam(self)
            if ours is not None:
                ours.step(recv_reqs)

    return process_input_requests


def _counting_flush(original: Function) -> Function:
    def flush_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        emptied = original(self, *args, **kwargs)
        ours = self.__dict__.get("_dp_sidecar")
        if ours is not None:
            ours.flushed(emptied)
        return emptied

    return flush_cache


def _scheduler_seam(scheduler: Any) -> Any:
    """The reporting side of a rank-zero scheduler; None in the other processes of its rank."""
    try:
        from sglang_hook.scheduler_seam import SchedulerSeam, is_rank_zero

        return SchedulerSeam(scheduler, settings()) if is_rank_zero(scheduler) else None
    except SeamMissing as error:
        logger.error("dp_sidecar: not attached, SGLang goes on without: %s", error)
        return None
    except Exception:
        logger.exception("dp_sidecar: scheduler not attached, its load is not reported")
        return None
