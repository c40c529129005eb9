"""THE schema that hook and sidecar share; docs/protocol.md explains it for other languages.

Every message is one msgpack array `[kind, version, ...]`. Arrays only grow at the tail: a reader
ignores elements it does not know and takes the default for those that are missing, so a newer
sidecar reads every older hook (the hook lives as long as the GPU server). `version` changes only
when an element changes its meaning.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from sidecar.errors import EndpointError, PeerError

VERSION = 1

# Bounds of what a peer may send. 1,024 ranks is over three times the largest published DP size
# (320); 4,096 requests is far over any tokenizer batch; a longer routing key travels as its digest.
MAX_RANKS = 1024
MAX_BATCH = 4096
MAX_KEY_BYTES = 1024
MAX_BLOCKS = 4096
MAX_INSTANCE_CHARS = 128
MAX_MESSAGE_BYTES = 8 << 20
# Microseconds: the bounds of the hook's round trips, the last bucket being what took longer. An
# answer takes 100 to 500 on one machine; a query waits 5,000 at most unless told otherwise.
ROUND_TRIP_US = (50, 75, 100, 150, 200, 300, 400, 600, 1000, 2000, 5000, 10000, 50000)
# Long against a request, short against the life of a server: what a rank has had to do lately.
RECENT_SECONDS = 300.0
MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un less the final NUL

Rank = Annotated[int, Meta(ge=0, lt=65536)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Instance = Annotated[str, Meta(min_length=1, max_length=MAX_INSTANCE_CHARS)]
Ranks = Annotated[list[Rank], Meta(max_length=MAX_RANKS)]
Counts = Annotated[list[Count], Meta(max_length=MAX_RANKS)]
Causes = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=32)]
About = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=256)]],
    Meta(max_length=32),
]
# An unsigned 64-bit hash: msgspec cannot express `lt=2**64`, msgpack cannot encode more.
Hash = Annotated[int, Meta(ge=0)]


class RequestFacts(Struct, array_like=True, gc=False):
    """What the hook knows of one tokenized request."""

    routing_key: Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)] = b""
    """Routing key, or its digest if longer than MAX_KEY_BYTES; empty: none."""
    namespace: Hash = 0
    """`hashing.namespace_hash` of extra_key, cache_salt and LoRA; 0: none."""
    tokens: Count = 0
    """Prompt length in tokens."""
    prefix_hash: Hash | None = None
    """Token-prefix hash, if the last reply wanted one for such a request."""
    block_hashes: Annotated[list[Hash], Meta(max_length=MAX_BLOCKS)] = []
    """Chained hashes of the prompt's leading blocks, if the last reply wanted them."""
    last_rank: Annotated[int, Meta(ge=-1, lt=65536)] = -1
    """Rank that the affinity key was last sent to; -1: unknown."""
    last_age_ms: Annotated[int, Meta(ge=-1, le=1 << 62)] = -1
    """Milliseconds since then; -1: unknown."""


class Past(Struct, array_like=True, gc=False):
    """A dispatch that this sidecar did not decide: before it started, or while it was away."""

    facts: RequestFacts
    rank: Rank
    age_ms: Count


class Telemetry(Struct, array_like=True, gc=False):
    """What the hook has measured of its queries since `epoch`; sums, so a lost one does no harm."""

    round_trips: Annotated[
        list[Count], Meta(min_length=len(ROUND_TRIP_US) + 1, max_length=len(ROUND_TRIP_US) + 1)
    ]
    """Queries by how long they waited for their answer, or in vain: up to and with each bound of
    ROUND_TRIP_US, and longer."""
    round_trip_ns: Count
    """Sum of these waits, nanoseconds."""
    breaker_opened: Count
    """How often the breaker went from closed to open."""
    breaker_open: bool
    """Whether it is open as this is told: nobody waits for an answer then."""


class Query(Struct, array_like=True, tag="query", gc=False):
    """Hook -> sidecar: choose a rank for each request. No request: a greeting or a probe."""

    version: int
    seq: Count
    """Echoed in the answer, so that a late answer is recognised."""
    instance: Instance
    epoch: Count
    """Start of the controller process (ns since 1970): tells a new incarnation from an old one."""
    ranks: Ranks
    """Stable ids of the live ranks, ascending."""
    sent: Counts
    """Requests sent to each of `ranks` since `epoch`, by any path."""
    sent_tokens: Counts
    """Prompt tokens of those requests."""
    requests: Annotated[list[RequestFacts], Meta(max_length=MAX_BATCH)]
    bypassed: Causes | None = None
    """Requests decided without the sidecar since `epoch`, by cause; null: as said before."""
    abstained: Causes | None = None
    """Requests left to SGLang on purpose since `epoch`, by cause; null: as said before."""
    about: About | None = None
    """Versions and settings of the hook; sent on connecting."""
    history: Annotated[list[Past], Meta(max_length=MAX_BATCH)] = []
    """Past dispatches, if the last reply wanted some; a part with each query, the newest first."""
    telemetry: Telemetry | None = None
    """With greetings and probes, and about once a second with a query; null: not told now."""


class Want(Struct, array_like=True, gc=False, frozen=True):
    """What the active policy reads, so that the hook computes nothing else."""

    prefix_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Tokens that the prefix hash covers; 0: no prefix hash."""
    prefix_with_key: bool = False
    """Whether requests with a routing key need the prefix hash too."""
    block_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Tokens of a block of the chained hashes; 0: none."""
    max_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    block_growth: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """n: a block is as long as the n-th part of what precedes it, rounded down to whole
    block_tokens, and at least one; 0: all are equal."""
    history: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """How many past dispatches a sidecar that knows none of them wants to be told."""


class Reply(Struct, array_like=True, tag="reply", gc=False):
    """Sidecar -> hook: the rank and the reason of each request, in the order of the query."""

    version: int
    seq: int
    boot: int
    """Start of the sidecar (ns since 1970): on a new one the hook sends every fact again."""
    policy: str
    policy_version: int
    """Counts the policies that this sidecar has run; 1 is the first."""
    ranks: list[int]
    reasons: list[str]
    want: Want


class Refusal(Struct, array_like=True, tag="refusal", gc=False):
    """Sidecar -> hook: the query cannot be served."""

    version: int
    seq: int
    """Sequence number of the query; 0 if it could not be read."""
    cause: str
    detail: str


class LoadReport(Struct, array_like=True, tag="load", gc=False):
    """Scheduler -> sidecar, rank-zero process of each DP rank; one moment's sample."""

    version: int
    instance: Instance
    rank: Rank
    epoch: Count
    """Start of the scheduler process (ns since 1970)."""
    seq: Count
    """Ascends within an epoch; an older report than the last is dropped."""
    received: Count
    """Requests taken in since `epoch`, sampled together with the queue lengths below."""
    received_tokens: Count
    running: Count
    waiting: Count
    tokens: Count = 0
    """KV tokens of running requests plus prompt tokens waiting (SGLang's num_total_tokens)."""
    capacity_tokens: Count = 0
    max_running: Count = 0
    waiting_uncached_tokens: Count = 0
    prefilling_tokens: Count = 0
    """Prompt tokens still to be computed of the request whose prefill is under way in chunks."""
    admitted_tokens: Count = 0
    """Prompt tokens of all requests whose prefill began since `epoch`."""
    cached_tokens: Count = 0
    """Of those, tokens that were found in the prefix cache."""
    flushes: Count = 0
    """How often the prefix cache was emptied since `epoch`."""
    recent_uncached_tokens: Count = 0
    """Prompt tokens computed, the older the less: each counts exp(-age / RECENT_SECONDS)."""


# Causes of a refused or dropped message, equal to the metric label.
REFUSALS = (
    "version",
    "malformed",
    "field",
    "utf8",
    "no_live_rank",
    "older_controller",
    "too_many_instances",
    "stale_report",
    "internal",
)

_encoder = msgspec.msgpack.Encoder()
_query = msgspec.msgpack.Decoder(Query)
_report = msgspec.msgpack.Decoder(LoadReport)
_answer = msgspec.msgpack.Decoder(Reply | Refusal)

_KINDS: tuple[type[Struct], ...] = (Query, Reply, Refusal, LoadReport)
_LISTS: dict[str, type[Struct]] = {"requests": RequestFacts, "history": Past}
_STRUCTS: dict[str, type[Struct]] = {
    "want": Want,
    "facts": RequestFacts,
    "telemetry": Telemetry,
}

encode = _encoder.encode
T = TypeVar("T", Query, LoadReport, Reply | Refusal)


def decode_query(data: bytes) -> Query:
    """Decode a query. Raises PeerError, which names the field and the bound."""
    query = _decode(_query, data)
    if len(query.sent) != len(query.ranks) or len(query.sent_tokens) != len(query.ranks):
        raise PeerError("field", "sent and sent_tokens need one element for each of ranks")
    return query


def decode_report(data: bytes) -> LoadReport:
    """Decode a load report. Raises PeerError, which names the field and the bound."""
    return _decode(_report, data)


def decode_answer(data: bytes) -> Reply | Refusal:
    """Decode the answer to a query. Raises PeerError."""
    return _decode(_answer, data)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explain(data, error) from None
    if message.version != VERSION:
        raise PeerError("version", _version_text(message.version))
    return message


def _explain(data: bytes, error: Exception) -> PeerError:
    """Tell bytes that are not msgpack, a wrong version and a wrong field apart."""
    # Which of the two msgspec raises for a bad string depends on its version.
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
        return PeerError("utf8", f"a string is not UTF-8: {error}")
    try:
        raw: Any = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as worse:
        return PeerError("malformed", f"not one msgpack value: {worse}")
    if not isinstance(raw, list) or len(raw) < 2:
        return PeerError("field", f"a message is an array of a kind and a version: {error}")
    if isinstance(raw[1], int) and raw[1] != VERSION:
        return PeerError("version", _version_text(raw[1]))
    if str(error).startswith("Invalid value"):
        # msgspec quotes what stands there, which may be anything, a routing key too.
        return PeerError("field", "kind: not one that is read here")
    return PeerError("field", _name_fields(str(error), raw[0]))


def _name_fields(text: str, kind: object) -> str:
    """Put names where msgspec tells positions: `$[8][0][1]` is requests[0].namespace."""
    path = re.search(r"`\$((?:\[[\d.]+\])+)`", text)
    top = next((k for k in _KINDS if k.__struct_config__.tag == kind), None)
    if path is None or top is None:
        return text
    steps = path.group(1)[1:-1].split("][")
    fields, nested, name = ("kind", *top.__struct_fields__), None, ""
    for step in steps:
        if fields and step.isdecimal() and int(step) < len(fields):
            field = fields[int(step)]
            name += f".{field}" if name else field
            nested, inner = _LISTS.get(field), _STRUCTS.get(field)
            fields = inner.__struct_fields__ if inner else ()
        else:
            name += f"[{step}]"
            fields = nested.__struct_fields__ if nested else ()
    return text.replace(path.group(0), f"`{name}`")


def _version_text(version: int) -> str:
    return f"the peer speaks protocol version {version}, this side speaks {VERSION}"


def report_endpoint(endpoint: str) -> str:
    """Address of the load-report socket that belongs to the query socket at `endpoint`.

    `ipc://PATH` -> `ipc://PATH.reports`; `tcp://HOST:PORT` -> the next port.
    """
    if endpoint.startswith("ipc://"):
        return endpoint + ".reports"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"


def check_endpoint(endpoint: str, *, allow_tcp: bool) -> str:
    """Return `endpoint` if both sockets can live there. Raises EndpointError.

    allow_tcp: whether there are CURVE keys, or the operator does without.
    """
    return _check(endpoint, len(".reports"), 65534, allow_tcp=allow_tcp)


def check_report_endpoint(endpoint: str, *, allow_tcp: bool) -> str:
    """The same for an address of load reports alone."""
    return _check(endpoint, 0, 65535, allow_tcp=allow_tcp)


def _check(endpoint: str, suffix: int, last_port: int, *, allow_tcp: bool) -> str:
    """suffix: bytes that the name of a second socket adds to the path."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/"):
            raise EndpointError(f"{endpoint}: an ipc:// address needs an absolute path")
        if "\0" in path:
            raise EndpointError(f"{endpoint!r}: a path has no NUL")
        size = len(path.encode(errors="surrogateescape"))
        if size + suffix > MAX_IPC_PATH_BYTES:
            less = " less the suffix of the report socket" if suffix else ""
            raise EndpointError(
                f"{endpoint}: the path has {size} bytes, at most {MAX_IPC_PATH_BYTES - suffix} fit "
                f"({MAX_IPC_PATH_BYTES} of a Unix socket{less})"
            )
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        number = int(port) if port.isascii() and port.isdecimal() else 0
        if not host or not 0 < number <= last_port:
            raise EndpointError(
                f"{endpoint}: a tcp:// address needs a host and a port, 1 to {last_port}"
            )
        if not allow_tcp:
            raise EndpointError(
                f"{endpoint}: TCP carries routing keys unencrypted; give CURVE keys, or say with "
                "allow_insecure_tcp that it may"
            )
        return endpoint
    raise EndpointError(f"{endpoint!r}: an address begins with ipc:// or tcp://")
