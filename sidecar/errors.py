"""The error tree. Every error says whose fault it is.

SidecarError
├── ConfigError       the operator's: a file, flag or environment variable; names field and bound
├── EndpointError     the operator's: an address that cannot be used, or is in use
├── ControlError      the caller's: no sidecar answers at the control socket
│   └── RefusedError  the caller's: it answered that the order is wrong; names field and bound
├── PolicyError       a policy author's: its code failed
│   └── .policy       its name
└── PeerError         a peer's: a message that cannot be served
    └── .cause        one of `wire.REFUSALS` or `published.stat.CAUSES`, equal to the metric label
"""


class SidecarError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(SidecarError):
    """A setting is unknown, of the wrong type or out of bounds."""


class EndpointError(SidecarError):
    """A socket address is malformed, too long, not allowed or held by somebody else."""


class ControlError(SidecarError):
    """The control socket is absent, silent, or not one."""


class RefusedError(ControlError):
    """The sidecar refused an order; what was in force stays."""


class PolicyError(SidecarError):
    """The code of a policy failed; `__cause__` is how.

    The text says what kind of error and where, not what it told: that may hold a routing key.
    """

    def __init__(self, policy: str, cause: BaseException) -> None:
        trace = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = ""
        if trace is not None:
            file = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
            where = f" at {file}:{trace.tb_lineno}"
        super().__init__(f"policy {policy} failed: {type(cause).__name__}{where}")
        self.policy = policy
        self.__cause__ = cause


class PeerError(SidecarError):
    """A message from the hook cannot be served; `cause` is its metric label."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
