"""A scheduler without a model, for the place of `sglang.srt.managers.scheduler.Scheduler`.

It is SGLang's `event_loop_normal` with time spent asleep in place of a forward pass. Names and
states at the seams a plugin wraps are SGLang's: `last_batch` is a prefill not yet merged, or
`running_batch` itself after a decode; finished requests stay in a batch until the next step.
"""

import time
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    HealthCheckOutput,
    RpcReqInput,
    sock_recv,
    sock_send,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.utils import is_health_check_generate_req
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from bench.simulated import control
from bench.simulated.batch import SimulatedBatch, SimulatedRequest
from bench.simulated.load import LoadInquirer, find_placement, open_writer
from bench.simulated.model import CONTEXT_TOKENS
from bench.simulated.output import embedding_output, token_output
from bench.simulated.prefix_cache import PrefixCache
from bench.simulated.settings import read_settings

# Eight idle ranks on two cores must not spin; requests wake the poll at once.
IDLE_POLL_MS = 50


class SimulatedScheduler:
    def __init__(self, server_args: Any, port_args: Any, *ranks: int | None) -> None:
        self.server_args = server_args
        self.port_args = port_args
        self.settings = read_settings()
        self.placement = find_placement(server_args, ranks)
        self.load_snapshot_writer = open_writer(server_args, port_args, self.placement)
        self.load_inquirer = LoadInquirer(self)
        self.tree_cache = PrefixCache(self.settings.cache_tokens)
        self.waiting_queue: list[SimulatedRequest] = []
        self.running_batch = SimulatedBatch()
        self.last_batch: SimulatedBatch | None = None
        self.chunked_req: SimulatedRequest | None = None
        self.return_health_check_ipcs: list[str | None] = []
        self._prompt_tokens = self._cached_prompt_tokens = 0
        self._init_ipc_channels()
        self._init_teardown()

    def _init_ipc_channels(self) -> None:
        self.ipc_channels = SchedulerIpcChannels.create(
            port_args=self.port_args,
            is_rank_zero=self.placement.is_rank_zero,
            skip_tokenizer_init=self.server_args.skip_tokenizer_init,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        channels = (self.ipc_channels.recv_from_tokenizer, self.ipc_channels.recv_from_rpc)
        self._sockets = [socket for socket in channels if socket is not None]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _init_teardown(self) -> None:
        """What `run_scheduler_process` touches after the loop."""
        self.gracefully_exit = False
        self.async_d2h_worker = None
        self.metrics_reporter = SimpleNamespace(_shutdown_fpm=lambda: None)

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
    def cache_hit_rate(self) -> float:
        return self._cached_prompt_tokens / max(1, self._prompt_tokens)

    def run_event_loop(self) -> None:
        while not self.gracefully_exit:
            self.process_input_requests(self._receive())
            batch = self.get_next_batch_to_run()
            if batch is not None:
                self.run_batch(batch)
            self.last_batch = batch
            if batch is not None:
                self.process_batch_result(batch)
            else:
                self.on_idle()

    def _receive(self) -> list[Any]:
        busy = self.last_batch is not None or not self.is_fully_idle()
        self._poller.poll(0 if busy else IDLE_POLL_MS)
        received = []
        for socket in self._sockets:
            while socket.poll(0):
                received.append(sock_recv(socket))
        return received

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

    def handle_generate_request(self, recv_req: Any) -> None:
        request = SimulatedRequest(recv_req, self.settings.default_output_tokens)
        self.waiting_queue.append(request)
        if self.settings.journal:
            with open(self.settings.journal, "a", encoding="utf-8") as journal:
                journal.write(f"{request.rid}\t{self.placement.dp_rank}\n")

    def flush_cache(self) -> bool:
        idle = self.is_fully_idle()
        if idle:
            self.tree_cache.clear()
        return idle

    def abort_request(self, recv_req: AbortReq) -> None:
        """Queued requests leave at once, those in a batch with the next step, as in SGLang."""

        def is_meant(req: SimulatedRequest) -> bool:
            return recv_req.abort_all or req.rid.startswith(recv_req.rid)

        for req in filter(is_meant, self.waiting_queue):
            abort = AbortReq(rid=req.rid, finished_reason=recv_req.finished_reason)
            self.ipc_channels.send_to_tokenizer.send_output(abort, req)
        self.waiting_queue = [req for req in self.waiting_queue if not is_meant(req)]
        for req in filter(is_meant, self._inflight()):
            req.to_finish = FINISH_ABORT().to_json()

    def _inflight(self) -> list[SimulatedRequest]:
        reqs = [*self.running_batch.reqs]
        if self.last_batch is not None and self.last_batch is not self.running_batch:
            reqs += self.last_batch.reqs
        if self.chunked_req is not None and self.chunked_req not in reqs:
            reqs.append(self.chunked_req)
        return [req for req in reqs if not req.finished()]

    def is_fully_idle(self) -> bool:
        return not (self.waiting_queue or self._inflight())

    # Steps

    def get_next_batch_to_run(self) -> SimulatedBatch | None:
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self.last_batch.filter_batch(exclude=self.chunked_req)
            self.running_batch.reqs += self.last_batch.reqs
        self.running_batch.filter_batch()
        prefill = self._get_new_batch_prefill()
        if prefill is not None:
            return prefill
        return None if self.running_batch.is_empty() else self.running_batch

    def _get_new_batch_prefill(self) -> SimulatedBatch | None:
        batch = SimulatedBatch(forward_mode=ForwardMode.EXTEND)
        chunked, self.chunked_req = self.chunked_req, None
        if chunked is not None:
            self._add_to_prefill(batch, chunked)
        room = self.settings.max_running_requests - len(self.running_batch.reqs)
        while self.waiting_queue and self.chunked_req is None and len(batch.reqs) < room:
            if batch.new_tokens >= self.settings.chunked_prefill_tokens:
                break
            request = self.waiting_queue.pop(0)
            request.cached_tokens = self.tree_cache.match(
                request.namespace, request.origin_input_ids
            )
            request.prefix_len = request.cached_tokens
            self._prompt_tokens += len(request.origin_input_ids)
            self._cached_prompt_tokens += request.cached_tokens
            self._add_to_prefill(batch, request)
        return None if batch.is_empty() else batch

    def _add_to_prefill(self, batch: SimulatedBatch, request: SimulatedRequest) -> None:
        batch.reqs.append(request)
        if request.to_finish is not None:  # it ends with this step, whatever its prompt lacks
            return
        tokens = min(
            request.uncached_tokens, self.settings.chunked_prefill_tokens - batch.new_tokens
        )
        request.prefix_len += tokens
        batch.new_tokens += tokens
        if request.uncached_tokens:
            self.chunked_req = request

    def run_batch(self, batch: SimulatedBatch) -> None:
        if batch.forward_mode.is_extend():
            time.sleep(self.settings.prefill_seconds(batch.new_tokens))
        else:
            time.sleep(self.settings.decode_seconds())

    def process_batch_result(self, batch: SimulatedBatch) -> None:
        self.publish_load_snapshot(force=batch.forward_mode.is_extend())
        done = [req for req in batch.reqs if req is not self.chunked_req]
        for req in done:
            req.advance()
            if batch.forward_mode.is_extend() or req.finished():
                self._cache(req)
        self._send([req for req in done if req.finished() or req.stream])
        self._answer_health_checks()

    def _cache(self, req: SimulatedRequest) -> None:
        # The key-value pair of a token exists only once a step has read that token.
        computed = req.origin_input_ids[: req.prefix_len] + req.output_ids[:-1]
        self.tree_cache.insert(req.namespace, computed)

    def _send(self, reqs: list[SimulatedRequest]) -> None:
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

    def publish_load_snapshot(self, force: bool = False) -> Any:
        writer = self.load_snapshot_writer
        if writer is None:
            return None
        writer.publish_counter += 1
        if not force and writer.publish_counter < writer.publish_interval:
            return None
        writer.publish_counter = 0
        load = self.load_inquirer.get_loads()
        writer.write(load)
        return load
