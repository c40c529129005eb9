"""Where the commands of the pages are run: a folder in place of /run, /etc, /opt and /var/lib."""

import os
import pty
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from tests.processes import ROOT, Running, clean_env, free_port, running, wait_for

_STAND_IN = """
import json, os, sys
file = os.environ["STAND_IN_RECORD"]
told = {"argv": sys.argv[1:], "endpoint": os.environ.get("DP_SIDECAR_ENDPOINT")}
open(file, "w").write(json.dumps(told))
"""


class Sandbox:
    """A folder, ports, and the environment of a person who types there.

    The settings that a machine with the default addresses would need no variable for are variables
    here, so that commands are run as they stand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.cwd = folder, folder / "here"
        self.cwd.mkdir()
        self.socket = folder / "run" / "query.sock"
        self.log = folder / "lib" / "decisions"
        self.log.parent.mkdir()
        self.port, self.reports_port, self.server_port = free_port(), free_port(), free_port()
        self.places = {
            ".venv/bin/": f"{Path(sys.executable).parent}/",
            "/run/sglang-dp-sidecar": str(self.socket.parent),
            "/var/lib/sglang-dp-sidecar": str(self.log.parent),
            "/etc/": f"{folder}/etc/",
            "/opt/": f"{folder}/opt/",
            "localhost:9477": f"localhost:{self.port}",
            "HOST:9477": f"localhost:{self.port}",
            "10.0.0.1:9478": f"127.0.0.1:{self.reports_port}",
            "localhost:30000": f"localhost:{self.server_port}",
            "--port 30000": f"--port {self.server_port}",
        }
        self.env = clean_env(
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            DP_SIDECAR_ENDPOINT=f"ipc://{self.socket}",
            DP_SIDECAR_ADMIN_PORT=str(self.port),
        )

    def here(self, command: str) -> str:
        """The command with the places of this sandbox; `&` at its end is the caller's affair."""
        for place, ours in self.places.items():
            command = command.replace(place, ours)
        return command.removesuffix(" &")

    def run(self, command: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run it as typed, by bash, and wait for its end."""
        return subprocess.run(
            ["bash", "-c", self.here(command)],
            cwd=self.cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, command: str, **env: str) -> AbstractContextManager[Running]:
        """Run it as typed until the block ends."""
        cd = f"cd {self.cwd} && exec "
        return running(["bash", "-c", cd + self.here(command)], env=self.env | env)

    def in_terminal(self, command: str, key: bytes) -> tuple[int, str]:
        """Run it in a terminal, press a key when it shows something; exit code, what it showed."""
        ours, theirs = pty.openpty()
        env = self.env | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        with subprocess.Popen(
            ["bash", "-c", "exec " + self.here(command)],
            cwd=self.cwd,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as process:
            os.close(theirs)
            os.set_blocking(ours, False)
            shown = b""

            def ended() -> bool:
                nonlocal shown
                with suppress(OSError):  # nothing yet, or nobody at the other end any more
                    shown += os.read(ours, 65536)
                    if b"version" in shown:
                        os.write(ours, key)
                return process.poll() is not None

            try:
                wait_for(ended, 30, 0.05)
            finally:
                process.kill()
                os.close(ours)
        return process.returncode, shown.decode(errors="replace")

    def stand_in(self) -> dict[str, str]:
        """A package `sglang` whose server notes how it was started; the environment for it."""
        package = self.folder / "stand_in" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "launch_server.py").write_text(_STAND_IN)
        return {"PYTHONPATH": str(package.parent), "STAND_IN_RECORD": str(self.record)}

    @property
    def record(self) -> Path:
        """What the stand-in notes, as JSON: argv, endpoint."""
        return self.folder / "record.json"


def copy_of_checkout(folder: Path) -> Path:
    """What `git clone` would give of the package and deploy/, without our build folders."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("sidecar", "sglang_hook", "deploy", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder
