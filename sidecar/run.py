"""`sglang-dp-sidecar run`: the sidecar and an SGLang server beside it, as one command.

The server decides how long it lives: its exit code is ours, signals go to it, and the sidecar is
started again whenever it dies. SGLang serves without it meanwhile. SIGHUP reloads the sidecar's
configuration, SIGUSR2 has a new sidecar process take over from the running one.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from sidecar.config import Config, ServeConfig
from sidecar.errors import ConfigError
from sidecar.logs import logger

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Restart pauses, seconds: the first crash costs little, a broken installation does not spin.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
_TAKE_OVER = ["--take-over"]
UNAVAILABLE = 69  # exit code of a sidecar whose address is held by another, see cli


def run(
    settings: Config,
    config_file: str | None,
    flags: Mapping[str, str],
    server: Sequence[str],
    server_module: str,
) -> int:
    """Run both until the server ends; return its exit code (128 + n if signal n ended it).

    Raises ConfigError if no server arguments are given.
    """
    arguments = list(server[1:] if server[:1] == ["--"] else server)
    if not arguments:
        raise ConfigError("run: give the arguments of the SGLang server after --")
    endpoint = settings.serve.endpoint
    with contextlib.ExitStack() as stack:
        if endpoint == ServeConfig().endpoint and not _makeable(endpoint):
            folder = tempfile.TemporaryDirectory(prefix="sglang-dp-sidecar-")
            endpoint = f"ipc://{stack.enter_context(folder)}/query.sock"
            logger.info("no right to the default endpoint, using %s", endpoint)
        return _run_at(endpoint, settings, config_file, flags, [server_module, *arguments])


def _makeable(endpoint: str) -> bool:
    """Whether the directory of an ipc endpoint is there or can be made."""
    directory = Path(endpoint.removeprefix("ipc://")).parent
    return os.access(directory if directory.exists() else directory.parent, os.W_OK)


def _run_at(
    endpoint: str,
    settings: Config,
    config_file: str | None,
    flags: Mapping[str, str],
    server: list[str],
) -> int:
    env = dict(os.environ, DP_SIDECAR_ENDPOINT=endpoint)
    if settings.serve.allow_insecure_tcp:
        env["DP_SIDECAR_ALLOW_INSECURE_TCP"] = "true"
    sidecar = [sys.executable, "-m", "sidecar", "serve"]
    sidecar += ["--config", config_file] if config_file else []
    sidecar += [f"{flag}={value}" for flag, value in flags.items() if flag != "--endpoint"]
    sidecar.append(f"--endpoint={endpoint}")
    return asyncio.run(_run(sidecar, [sys.executable, "-m", *server], env))


async def _run(sidecar: list[str], server: list[str], env: dict[str, str]) -> int:
    loop = asyncio.get_running_loop()
    keeper = Keeper(sidecar, env)
    keeping = asyncio.create_task(keeper.keep())
    process = await _start(server, env)
    for number in FORWARDED:
        loop.add_signal_handler(number, _send, process, number)
    loop.add_signal_handler(signal.SIGHUP, keeper.send, signal.SIGHUP)
    loop.add_signal_handler(signal.SIGUSR2, keeper.upgrade)
    try:
        code = await process.wait()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await keeper.stop()
    logger.info("the server ended with %d", code)
    return 128 - code if code < 0 else code


class Keeper:
    """Keeps one sidecar process alive."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # The working directory must not shadow the package `sidecar`.
        self.command, self.env = command, dict(env, PYTHONSAFEPATH="1")
        self.process: Process | None = None
        self._successor: Process | None = None
        self._upgrading: asyncio.Task[None] | None = None

    async def keep(self) -> None:
        """Start the sidecar again and again, until cancelled."""
        pause, code, taking = FIRST_PAUSE, None, False
        while True:
            started = time.monotonic()
            try:
                # 0: it handed over to a process that is not ours. We take that one's place, or
                # nobody would end it with the server.
                taking = code == 0 or (taking and code == UNAVAILABLE)
                more = _TAKE_OVER if taking else []
                self.process = await _start([*self.command, *more], self.env)
                code = await self.process.wait()
                while self._adopt():
                    code = await self.process.wait()
                ended: object = code
            except OSError as error:  # no process, no descriptor, no memory: it may pass
                code, ended = None, error.strerror
            if time.monotonic() - started > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            logger.warning("the sidecar ended with %s; again in %.1f s", ended, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def upgrade(self) -> None:
        """Start a successor of the sidecar, which takes its place without a gap; one at a time."""
        if self._upgrading is not None and not self._upgrading.done():
            logger.warning("upgrade: a successor is being started already")
            return
        self._upgrading = asyncio.create_task(self._upgrade())

    async def _upgrade(self) -> None:
        try:
            successor = await _start([*self.command, *_TAKE_OVER], self.env)
        except OSError as error:
            logger.error("upgrade: no successor: %s; the sidecar serves on", error.strerror)
            return
        logger.info("upgrade: started successor pid %d", successor.pid)
        self._successor = successor
        code = await successor.wait()
        self._successor = None
        logger.error("upgrade: the successor ended with %d; the sidecar serves on", code)

    def _adopt(self) -> bool:
        """Whether a successor runs; it is the sidecar from now on."""
        successor, self._successor = self._successor, None
        if successor is None or successor.returncode is not None:
            return False
        if self._upgrading is not None:
            self._upgrading.cancel()
        self._upgrading, self.process = None, successor
        logger.info("upgrade: the sidecar is pid %d now", successor.pid)
        return True

    def send(self, number: int) -> None:
        """Pass a signal to the sidecar, if it runs."""
        if self.process is not None:
            _send(self.process, number)

    async def stop(self) -> None:
        """End the sidecar, and its successor if one is starting: politely, then not."""
        if self._upgrading is not None:
            self._upgrading.cancel()
            await asyncio.gather(self._upgrading, return_exceptions=True)
        running = [p for p in (self.process, self._successor) if p is not None]
        await asyncio.gather(*(_end(process) for process in running))


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    _send(process, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 5)
    except asyncio.TimeoutError:
        _send(process, signal.SIGKILL)
        await process.wait()


async def _start(command: list[str], env: dict[str, str]) -> Process:
    # A session of its own: Ctrl-C in a terminal reaches us alone, and we pass it on once.
    return await asyncio.create_subprocess_exec(
        *command, env=env, start_new_session=True, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when `run` is killed: nothing it started stays behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _send(process: Process, number: int) -> None:
    if process.returncode is None:
        process.send_signal(number)
