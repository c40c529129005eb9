"""What does it weigh? Import of the inert plugin; memory of the sidecar over a million keys.

`python -m bench.footprint [--json]`. The plugin is imported and called in fresh interpreters
without DP_SIDECAR_ENDPOINT, as in an SGLang process that does not use it. The sidecar decides a
million requests with a routing key each; its resident memory is read on the way. To reach: 5 ms,
neither zmq nor msgspec loaded; 80 MiB, flat.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from bench import report
from bench.roundtrip import Asker, Client, sidecar

IMPORTS = 9
BATCH = 1000
KEYS = (20_000, 200_000, 1_000_000)
_IMPORT = """
import json, sys, time
begun = time.perf_counter()
from sglang_hook.plugin import register
register()
spent = time.perf_counter() - begun
print(json.dumps([spent * 1000, [name for name in ("zmq", "msgspec") if name in sys.modules]]))
"""


def import_ms() -> tuple[dict[str, float], list[str]]:
    """Milliseconds in fresh interpreters, and what was loaded that should not be."""
    times, loaded = [], set()
    for _ in range(IMPORTS):
        command = [sys.executable, "-c", _IMPORT]
        done = subprocess.run(command, env={}, capture_output=True, check=True)
        spent, extra = json.loads(done.stdout)
        times.append(spent)
        loaded |= set(extra)
    return report.spread(times), sorted(loaded)


def memory_mib() -> dict[str, float]:
    """Resident memory of a sidecar process after so many distinct routing keys, MiB."""
    with tempfile.TemporaryDirectory(prefix="dps-") as folder:
        endpoint = f"ipc://{Path(folder, 'q')}"
        with sidecar(endpoint, 0) as pid:
            client, asker = Client(endpoint), Asker()
            sizes, asked = {}, 0
            for keys in KEYS:
                while asked < keys:
                    asker.learn(client.ask(asker.query(BATCH)))
                    asked += BATCH
                sizes[str(keys)] = round(psutil.Process(pid).memory_info().rss / 2**20, 1)
            client.socket.close(0)
    return sizes


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    times, loaded = import_ms()
    sizes = memory_mib()
    result = {"plugin_import_ms": times, "plugin_loads": loaded, "sidecar_mib_by_keys": sizes}
    rows = [["", "value"]]
    rows += [[f"plugin import, {name}", f"{ms:.2f} ms"] for name, ms in times.items()]
    rows += [["zmq or msgspec loaded", ", ".join(loaded) or "no"]]
    rows += [[f"sidecar after {int(keys):,} keys", f"{mib} MiB"] for keys, mib in sizes.items()]
    report.show(result, rows, as_json=options.json)


if __name__ == "__main__":
    main()
