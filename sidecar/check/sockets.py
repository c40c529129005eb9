"""Addresses, the directory of the sockets, what lies there and who holds it."""

import ipaddress
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from sidecar import trust
from sidecar.catalog import Catalog
from sidecar.check.finding import Finding, note, ok, problem, warning
from sidecar.config import Config
from sidecar.curve import server_keys
from sidecar.errors import ConfigError, EndpointError
from sidecar.files import Lock
from sidecar.listener import control_path
from sidecar.sockets import Sockets
from sidecar.steering import prepare
from sidecar.tokens import read_token
from sidecar.wire import MAX_IPC_PATH_BYTES

ELSEWHERE = "choose another --endpoint, and the same DP_SIDECAR_ENDPOINT for SGLang"


def settings(config: Config) -> Iterator[Finding]:
    """What `serve` would refuse before it binds."""
    try:
        prepare(Catalog(), config.policy)
    except ConfigError as error:
        yield problem(str(error), "correct [policy]; docs/policies.md has the parameters")
    else:
        yield ok(f"policy {config.policy.name}")
    if config.admin.token_file:
        try:
            read_token(config.admin.token_file)
        except ConfigError as error:
            yield problem(str(error), "correct the file or the setting")
        else:
            yield ok(f"admin.token_file: {config.admin.token_file}")
    yield from _address(config)
    yield from _admin(config)


def _address(config: Config) -> Iterator[Finding]:
    serve = config.serve
    try:
        keys = server_keys(serve.curve_secret_key_file, serve.curve_client_keys_file)
        tried = Sockets(
            serve.endpoint,
            allow_tcp=serve.allow_insecure_tcp,
            reports_tcp=serve.reports_tcp,
            keys=keys,
        )
    except (ConfigError, EndpointError) as error:
        yield problem(str(error), "correct the address, or make keys with `keygen`")
        return
    tried.close()
    tcp = serve.endpoint.startswith("tcp://") or bool(serve.reports_tcp)
    if tcp and keys is None:
        yield warning(
            f"{serve.endpoint} {serve.reports_tcp}".strip()
            + ": TCP without CURVE keys: whoever reaches it can read routing keys and send reports",
            "`sglang-dp-sidecar keygen DIR`, or a network that you trust",
        )
    if not control_path(serve.endpoint, serve.control):
        yield note("no control socket: `policy` and --take-over cannot be used", "set --control")


def _admin(config: Config) -> Iterator[Finding]:
    host = config.admin.host
    if config.admin.port == 0:
        yield note("no HTTP: nobody can watch this sidecar", "set --admin-port")
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        yield warning(
            f"admin.host {host}: whoever reaches port {config.admin.port} can read /status and "
            "/metrics",
            "--admin-host=127.0.0.1, or a firewall",
        )


def owner(uid: int) -> str:
    """Name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Place:
    """Where an ipc:// endpoint lies. holder: process id of the sidecar that holds it, 0: nobody."""

    def __init__(self, config: Config) -> None:
        self.config = config
        endpoint = config.serve.endpoint
        self.path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""
        self.holder = self._holder() if self.path else 0

    def findings(self) -> Iterator[Finding]:
        """Directory, files, lock."""
        if self.path and self.path[:1] != "/":
            return  # the address is a problem of its own
        control = control_path(self.config.serve.endpoint, self.config.serve.control)
        given = self.config.serve.control
        size = len(os.fsencode(control))
        if given and size > MAX_IPC_PATH_BYTES:  # else the endpoint is too long, too
            yield problem(
                f"{control}: has {size} bytes, a Unix socket at most {MAX_IPC_PATH_BYTES}",
                "a shorter --control",
            )
        if self.path:
            yield from _directory(Path(self.path).parent, "--endpoint")
            yield from _file(self.path, ELSEWHERE, held=bool(self.holder))
            yield from _file(self.path + ".reports", ELSEWHERE, held=bool(self.holder))
        if control:
            if given and Path(given).parent != Path(self.path).parent:
                yield from _directory(Path(given).parent, "--control")
            yield from _file(control, "choose another --control", held=bool(self.holder))
        if self.path:
            yield from self._lock()

    def _holder(self) -> int:
        lock = Lock(self.path)
        if lock.free():
            return 0
        try:
            return int(Path(lock.path).read_text() or -1)
        except (OSError, ValueError):
            return -1

    def _lock(self) -> Iterator[Finding]:
        lock = Path(self.path + ".lock")
        if not self.holder:
            if lock.is_symlink() or (lock.exists() and not os.access(lock, os.R_OK | os.W_OK)):
                yield problem(
                    f"{lock}: cannot be locked by this user", f"remove it, or {ELSEWHERE}"
                )
            else:
                yield ok(f"{self.path}: no sidecar serves there")
            return
        who = f"a sidecar serves there, pid {self.holder}"
        try:
            uid = os.stat(f"/proc/{self.holder}").st_uid
        except OSError:
            yield note(f"{self.path}: {who}, which is in another container or hidden")
            return
        if uid != os.geteuid():
            yield problem(
                f"{self.path}: {who}, as user {owner(uid)}; this is user {owner(os.geteuid())}",
                "run sidecar, SGLang and this command as the same user: the sockets are 0600",
            )
        else:
            yield ok(f"{self.path}: {who}")


def _directory(directory: Path, flag: str) -> Iterator[Finding]:
    """Whether sockets can be made there, by us and by nobody else."""
    fix = f"as root: install -d -m 0700 -o {owner(os.geteuid())} {directory}; or choose {flag}"
    try:
        found = next(path for path in (directory, *directory.parents) if path.exists())
        status = found.stat()
    except (OSError, StopIteration) as error:
        yield problem(f"{directory}: {getattr(error, 'strerror', 'cannot be reached')}", fix)
        return
    if not stat.S_ISDIR(status.st_mode):
        yield problem(f"{found}: is not a directory", f"choose another {flag}")
        return
    mode = stat.S_IMODE(status.st_mode)
    if not os.access(found, os.W_OK | os.X_OK):
        yield problem(f"{found}: mode {mode:04o}, user {owner(os.geteuid())} may not write", fix)
    elif found != directory:
        yield ok(f"{directory}: is made at the start, mode 0700")
    elif trust.fault(f"{directory}/socket"):
        yield problem(
            f"{directory}: mode {mode:04o}: any user can put another socket there",
            f"chmod 700 {directory}, or choose another {flag}",
        )
    elif mode & 0o022 and not mode & stat.S_ISVTX:
        yield warning(
            f"{directory}: mode {mode:04o}: other users can put their own socket there",
            f"chmod 700 {directory}",
        )
    elif status.st_uid not in (0, os.geteuid()):
        yield warning(
            f"{directory}: belongs to {owner(status.st_uid)}, who can put another socket there",
            f"chown {owner(os.geteuid())} {directory}",
        )
    else:
        yield ok(f"{directory}: mode {mode:04o}, owner {owner(status.st_uid)}")


def _file(path: str, elsewhere: str, *, held: bool) -> Iterator[Finding]:
    """What lies at the path of a socket."""
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield problem(
            f"{path}: is not a socket, and is kept", f"{elsewhere}, or move that file away"
        )
    elif status.st_uid != os.geteuid():
        yield problem(
            f"{path}: belongs to user {owner(status.st_uid)}",
            f"run both as {owner(status.st_uid)}, or {elsewhere}",
        )
    elif held and stat.S_IMODE(status.st_mode) & 0o077:
        yield warning(f"{path}: mode {stat.S_IMODE(status.st_mode):04o}", f"chmod 600 {path}")
    elif not held:
        yield note(f"{path}: left by a sidecar that is gone; the next one replaces it")
