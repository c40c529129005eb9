"""Seams of the main process, where requests are tokenized, and of SGLang's HTTP workers.

Read in the wheels of 0.5.12 to 0.5.23.
"""

from types import ModuleType
from typing import Any

from sglang_hook.plugin import register
from sglang_hook.reading import CONTROLLER
from sglang_hook.wrapping import Function, seam, wrap

ENGINE = "sglang.srt.entrypoints.engine"
IO_STRUCT = "sglang.srt.managers.io_struct"
TOKENIZERS = "sglang.srt.managers.multi_tokenizer_mixin"


def run_controller_process(*args: Any, **kwargs: Any) -> Any:
    """What the main process starts as the controller.

    SGLang loads its plugins there from 0.5.22 on only, so the child attaches by itself.
    """
    controller = __import__(CONTROLLER, fromlist=["_"])
    register()
    return controller.run_data_parallel_controller_process(*args, **kwargs)


def attach_engine(module: ModuleType) -> None:
    """Let the controller's process attach by itself. Raises SeamMissing."""
    if seam(module, "run_data_parallel_controller_process") is not run_controller_process:
        # Pickled by reference into the child, which imports this file.
        module.run_data_parallel_controller_process = run_controller_process  # type: ignore[attr-defined]


def attach_io_struct(module: ModuleType) -> None:
    """Let each request of a batch keep the batch's routing key. Raises SeamMissing."""

    def make(original: Function) -> Function:
        def getitem(self: Any, i: int) -> Any:
            item = original(self, i)
            # SGLang drops the key from each request of a batch (sglang 37543).
            key = getattr(self, "routing_key", None)
            if key is not None and getattr(item, "routing_key", None) is None:
                item.routing_key = key[i % len(key)] if isinstance(key, list) and key else key
            return item

        return getitem

    wrap(seam(module, "GenerateReqInput"), "__getitem__", make)


class Carried:
    """Arrives as what it holds, and makes the hook attach where it arrives."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.held,)


def unpack(held: Any) -> Any:
    """Attach in a process that loads no plugins: what SGLang sends there brings us along."""
    register()
    return held


def attach_tokenizers(module: ModuleType) -> None:
    """Reach the HTTP workers of --tokenizer-worker-num, by the arguments that SGLang leaves
    for them in shared memory. Raises SeamMissing."""

    def make(original: Function) -> Function:
        def write_to_shared_memory(obj: Any, *args: Any, **kwargs: Any) -> Any:
            return original(Carried(obj), *args, **kwargs)

        return write_to_shared_memory

    wrap(module, "write_to_shared_memory", make)
