"""The error tree. Every error says whose fault it is.

SidecarError
├── ConfigError       the operator's: a file, flag or environment variable; names field and bound
├── EndpointError     the operator's: an address that cannot be used, or is in use
├── ControlError      the caller's: no sidecar answers at the control socket
│   └── RefusedError  the caller's: it answered that the order is wrong; names field and bound
└── PeerError         a peer's: a message that cannot be served
    └── .cause        one of `wire.REFUSALS`, equal to the metric label
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


class PeerError(SidecarError):
    """A message from the hook cannot be served; `cause` is its metric label."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
