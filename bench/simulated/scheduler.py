"""A scheduler without a model, for the place of `sglang.srt.managers.scheduler.Scheduler`.

It is SGLang's `event_loop_normal` around `bench.model.rank.Rank`, asleep for the time of a forward
pass. Names and states at the seams a plugin wraps are SGLang's: `last_batch` is a prefill not yet
merged, `running_batch` itself after a decode, or an idle batch while other ranks worked; finished
requests stay in a batch until the next step.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import zmq
from sglang.srt.managers.io_struct import HealthCheckOutput, RpcReqInput
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from bench.model.rank import Rank
from bench.model.steps import StepTimes, Work
from bench.simulated import control
from bench.simulated.batch import SimulatedBatch, SimulatedRequest
from bench.simulated.compat import (
    ShutdownReq,
    create_load_snapshot_writer,
    is_health_check_generate_req,
    open_channels,
    sock_recv,
    sock_send,
)
from bench.simulated.engine_metrics import EngineMetrics
from bench.simulated.load import LoadInquirer, find_placement, open_writer
from bench.simulated.model import CONTEXT_TOKENS
from bench.simulated.output import embedding_output, token_output
from bench.simulated.pace import Alone, Member, Pace, StepCounts
from bench.simulated.settings import read_settings

# Eight idle ranks on two cores must not spin; requests wake the poll at once.
IDLE_POLL_MS = 50


class SimulatedScheduler:
    def __init__(self, server_args: Any, port_args: Any, *ranks: int | None) -> None:
        self.server_args = server_args
        self.port_args = port_args
        self.settings = read_settings()
        self.placement = find_placement(server_args, ranks)
        self.dp_rank = self.placement.dp_rank
        writer = open_writer(server_args, port_args, self.placement)
        if create_load_snapshot_writer is not None:
            self.load_snapshot_writer = writer
        self.load_inquirer = LoadInquirer(self)
        self.engine_metrics = EngineMetrics(server_args)
        self.rank = Rank(self.settings.rank_spec())
        self.counts = StepCounts()
        self.running_batch = SimulatedBatch()
        self.last_batch: SimulatedBatch | None = None
        self.return_health_check_ipcs: list[str | None] = []
        self._work: Work | None = None
        self._inbox: list[Any] = []
        self.pace = self._find_pace()
        self._init_ipc_channels()
        self._init_teardown()

    def _find_pace(self) -> Pace:
        together = self.server_args.enable_dp_attention and self.placement.dp_ranks > 1
        # The other processes of a rank (attention TP) have no requests and wait for nobody.
        if not (together and self.placement.is_rank_zero):
            return Alone(StepTimes(self.settings), self.settings.time_scale)
        if not self.settings.barrier:
            raise RuntimeError("DP attention: start `python -m bench.simulated.server`")
        return Member(self.settings.barrier, self.placement.dp_rank, self.placement.dp_ranks)

    def _init_ipc_channels(self) -> None:
        self.ipc_channels = open_channels(
            self.server_args, self.port_args, self.placement.is_rank_zero
        )
        self.recv_from_tokenizer = self.ipc_channels.recv_from_tokenizer
        channels = (self.ipc_channels.recv_from_tokenizer, self.ipc_channels.recv_from_rpc)
        self._sockets = [socket for socket in channels if socket is not None]
        self._poller = zmq.Poller()
        for waker in (*self._sockets, self.pace.fileno()):
            if waker is not None:
                self._poller.register(waker, zmq.POLLIN)

    def _init_teardown(self) -> None:
        """What `run_scheduler_process` touches after the loop."""
        self.gracefully_exit = False
        self.async_d2h_worker = None
        self._shutdown_fpm = lambda: None
        self.metrics_reporter = SimpleNamespace(_shutdown_fpm=self._shutdown_fpm)

    def release_host_resources(self) -> None:
        """Nothing is pinned here."""

    def get_init_info(self) -> dict[str, Any]:
        return {
            "status": "ready",
            "max_total_num_tokens": self.settings.cache_tokens,
            "max_req_input_len": CONTEXT_TOKENS - 6,
            "startup_time": None,
        }

    @property
    def waiting_queue(self) -> Sequence[SimulatedRequest]:
        return cast(Sequence[SimulatedRequest], self.rank.waiting)

    @property
    def chunked_req(self) -> SimulatedRequest | None:
        return cast(SimulatedRequest | None, self.rank.chunked)

    def run_event_loop(self) -> None:
        try:
            while not self.gracefully_exit:
                self.process_input_requests(self._receive())
                self.take_step()
        finally:
            # The other ranks must not wait for this one.
            self.pace.close()

    def take_step(self) -> None:
        batch = self.get_next_batch_to_run()
        step = self.pace.step(self._work, self._is_told_to_stop)
        if step is None:
            self.last_batch = None
            self.on_idle()
            return
        self.counts.add(self._work, step)
        if batch is None:
            batch = SimulatedBatch(forward_mode=ForwardMode.IDLE)
        self.last_batch = batch
        self.process_batch_result(batch)

    def _receive(self) -> list[Any]:
        if self.last_batch is None:
            self._poller.poll(IDLE_POLL_MS)
        received = self._inbox + self._read()
        self._inbox = []
        return received

    def _read(self) -> list[Any]:
        received = []
        for socket in self._sockets:
            while socket.poll(0):
                received.append(sock_recv(socket))
        return received

    def _is_told_to_stop(self) -> bool:
        """What has come is dealt with when the step is over, unless it is the order to stop."""
        self._inbox += self._read()
        return any(isinstance(message, ShutdownReq) for message in self._inbox)

    # Requests and control messages

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for recv_req in recv_reqs:
            if is_health_check_generate_req(recv_req) and not self.is_fully_idle():
                self.return_health_check_ipcs.append(recv_req.http_worker_ipc)
                continue
            output = control.dispatch(self, recv_req)
            if isinstance(recv_req, RpcReqInput):
                sock_send(self.ipc_channels.recv_from_rpc, output)
            elif output is not None:
                self.ipc_channels.send_to_tokenizer.send_output(output, recv_req)

    def flush_cache(self) -> bool:
        return self.rank.flush()

    def is_fully_idle(self) -> bool:
        return not self.rank.requests

    # Steps

    def get_next_batch_to_run(self) -> SimulatedBatch | None:
        """Also sets `_work`, what the batch takes."""
        self._drop_aborted_chunk()
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self.last_batch.filter_batch(exclude=self.chunked_req)
            self.running_batch.reqs += self.last_batch.reqs
        self.running_batch.filter_batch()
        chunked = self.chunked_req
        self._work = self.rank.plan()
        if self._work is None:
            return None
        if not self._work.prefill:
            return self.running_batch
        reqs = cast(list[SimulatedRequest], [*self.rank.batch])
        self._note_admitted([req for req in reqs if req is not chunked])
        return SimulatedBatch(reqs, ForwardMode.EXTEND)

    def _drop_aborted_chunk(self) -> None:
        chunked = self.chunked_req
        if chunked is not None and chunked.to_finish is not None:
            control.drop(self, chunked, chunked.to_finish)

    def _note_admitted(self, reqs: list[SimulatedRequest]) -> None:
        if reqs and self.settings.journal:
            rank = self.placement.dp_rank
            lines = "".join(f"{req.rid}\t{rank}\t{req.cached}\n" for req in reqs)
            with open(self.settings.journal, "a", encoding="utf-8") as journal:
                journal.write(lines)

    def process_batch_result(self, batch: SimulatedBatch) -> None:
        extend = batch.forward_mode.is_extend()
        self.publish_load_snapshot(force=extend)
        done = [req for req in batch.reqs if req is not self.chunked_req]
        for req in done:
            req.advance()
            if req.to_finish is not None:
                self.rank.abort(req)
        if batch.reqs:
            self.rank.finish(extend)
        self.send_results([req for req in done if req.finished() or req.stream])
        self._answer_health_checks()

    def send_results(self, reqs: list[SimulatedRequest]) -> None:
        sender = self.ipc_channels.send_to_detokenizer
        texts = [req for req in reqs if not req.is_embedding]
        if texts:
            sender.send_output(token_output(texts, self.placement.dp_rank))
        embeddings = [req for req in reqs if req.is_embedding]
        if embeddings:
            sender.send_output(embedding_output(embeddings))

    def on_idle(self) -> None:
        self._answer_health_checks()
        self.publish_load_snapshot(force=True)

    def _answer_health_checks(self) -> None:
        for ipc in self.return_health_check_ipcs:
            self.ipc_channels.send_to_tokenizer.send_output(HealthCheckOutput(http_worker_ipc=ipc))
        self.return_health_check_ipcs.clear()

    def get_loads(self, _request: Any = None) -> Any:
        """What 0.5.12 has in place of snapshots."""
        return self.load_inquirer.get_loads()

    def publish_load_snapshot(self, force: bool = False) -> Any:
        writer = getattr(self, "load_snapshot_writer", None)
        if writer is None:
            return None
        writer.publish_counter += 1
        if not force and writer.publish_counter < writer.publish_interval:
            return None
        writer.publish_counter = 0
        load = self.load_inquirer.get_loads()
        writer.write(load)
        self.engine_metrics.write(load)
        return load
