"""Reads load reports on their way from a server's schedulers to its sidecar."""

import threading
from pathlib import Path

import zmq

from sidecar import wire

from .conftest import eventually

FIGURES = ("prefilling_tokens", "admitted_tokens", "cached_tokens", "flushes")


class Tap:
    """`endpoint` is for the hook: its queries reach the sidecar as ever, its reports through us."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        path = Path(f"{folder}/tap")
        path.symlink_to(endpoint.removeprefix("ipc://"))
        self.endpoint = f"ipc://{path}"
        self.last: dict[int, wire.LoadReport] = {}
        """Rank -> its newest report."""
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._source, self._sink = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._source.bind(wire.report_endpoint(self.endpoint))
        self._sink.connect(wire.report_endpoint(endpoint))
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _forward(self) -> None:
        while not self._stopped.is_set():
            if not self._source.poll(100):
                continue
            payload = self._source.recv()
            report = wire.decode_report(payload)
            self.last[report.rank] = report
            self._sink.send(payload)

    def settled(self) -> dict[str, int]:
        """Sums over the ranks, of reports that were made after this call."""
        # The last report may have been underway already; of the third, not even the sampling was.
        seen = {rank: report.seq + 3 for rank, report in self.last.items()}
        assert eventually(lambda: all(self.last[rank].seq >= seq for rank, seq in seen.items()))
        reports = list(self.last.values())
        return {name: sum(getattr(report, name) for report in reports) for name in FIGURES}

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)
