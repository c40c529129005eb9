"""What the releases before 0.5.16 of SGLang lack of what the simulated ranks are made of."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from sglang.srt.managers import io_struct

ShutdownReq: Any = getattr(io_struct, "ShutdownReq", None) or type("ShutdownReq", (), {})
"""0.5.14; before, nobody sends one."""

ARRAYS = "array" in str(io_struct.TokenizedGenerateReqInput.__annotations__)
"""Token ids are arrays, or lists up to 0.5.12."""

try:
    from sglang.srt.managers.load_snapshot import LoadSnapshot, create_load_snapshot_writer
except ImportError:  # 0.5.12: figures are made on demand, and travel with each answer
    create_load_snapshot_writer = None
    LoadSnapshot = io_struct.GetLoadsReqOutput

try:
    from sglang.srt.managers.utils import is_health_check_generate_req
except ImportError:  # 0.5.12
    from sglang.srt.managers.scheduler import is_health_check_generate_req

__all__ = (
    "ARRAYS",
    "LoadSnapshot",
    "ShutdownReq",
    "create_load_snapshot_writer",
    "fields_of",
    "is_health_check_generate_req",
    "make_loads",
    "open_channels",
    "sock_recv",
    "sock_send",
)


def fields_of(kind: Any) -> tuple[dict[str, None], set[str]]:
    """Of a message: the fields that must be given, and all."""
    if hasattr(kind, "__struct_fields__"):
        structs = msgspec.structs.fields(kind)
        return {each.name: None for each in structs if each.required}, {e.name for e in structs}
    classes = dataclasses.fields(kind)  # before 0.5.15
    unset = {
        each.name: None
        for each in classes
        if each.default is each.default_factory is dataclasses.MISSING
    }
    return unset, {each.name for each in classes}


def make_loads(**values: Any) -> Any:
    """A load snapshot: what this release does not know is dropped, what is missing is 0."""
    unset, known = fields_of(LoadSnapshot)
    given = {name: value for name, value in values.items() if name in known}
    return LoadSnapshot(**dict.fromkeys(unset, 0) | {"timestamp": time.time()} | given)


def sock_send(socket: Any, obj: Any) -> None:
    """SGLang's own, from 0.5.15 on."""
    if hasattr(io_struct, "sock_send"):
        io_struct.sock_send(socket, obj)
    else:
        socket.send_pyobj(obj)


def sock_recv(socket: Any) -> Any:
    """SGLang's own, from 0.5.15 on."""
    return io_struct.sock_recv(socket) if hasattr(io_struct, "sock_recv") else socket.recv_pyobj()


def open_channels(server_args: Any, port_args: Any, is_rank_zero: bool) -> Any:
    """The sockets of a rank."""
    try:
        from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    except ImportError:
        return _channels_of_0_5_12(port_args, is_rank_zero)
    return SchedulerIpcChannels.create(
        port_args=port_args,
        is_rank_zero=is_rank_zero,
        skip_tokenizer_init=server_args.skip_tokenizer_init,
        metrics_enabled=False,
        enable_scripted_runtime=False,
    )


def _channels_of_0_5_12(port_args: Any, is_rank_zero: bool) -> Any:
    from sglang.srt.managers.scheduler import SenderWrapper
    from sglang.srt.utils.network import get_zmq_socket

    context = zmq.Context(2)

    def connect(kind: int, name: str) -> Any:
        return get_zmq_socket(context, kind, name, False) if is_rank_zero else None

    return SimpleNamespace(
        recv_from_tokenizer=connect(zmq.PULL, port_args.scheduler_input_ipc_name),
        recv_from_rpc=connect(zmq.DEALER, port_args.rpc_ipc_name),
        send_to_tokenizer=SenderWrapper(connect(zmq.PUSH, port_args.tokenizer_ipc_name)),
        send_to_detokenizer=SenderWrapper(connect(zmq.PUSH, port_args.detokenizer_ipc_name)),
    )
