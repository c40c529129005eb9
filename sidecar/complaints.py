"""Faults of others and ours: each is counted, and told in the log as often as people can read."""

import os
import traceback

from sidecar.errors import EndpointError, PeerError, PolicyError
from sidecar.logs import RateLimit
from sidecar.metrics import Health


class Complaints:
    """Counts in `health`, tells through `limit`."""

    def __init__(self, health: Health, limit: RateLimit) -> None:
        self.health = health
        self.limit = limit

    def rejected(self, socket: str, error: PeerError) -> None:
        """A message cannot be served."""
        self.health.rejected[socket, error.cause] += 1
        self.limit.warning(f"{socket}/{error.cause}", f"{socket} refused ({error.cause}): {error}")

    def unanswerable(self, error: Exception) -> None:
        """A reply could not be sent."""
        self.health.rejected["query", "unanswerable"] += 1
        self.limit.warning("unanswerable", f"a reply could not be sent: {error}")

    def handshake(self, socket: str, cause: str, text: str) -> None:
        """A connection over TCP was not let in."""
        self.health.handshake_failures[socket, cause] += 1
        self.limit.warning(f"handshake/{socket}/{cause}", f"{socket}: {text}")

    def flooded(self, cause: str) -> None:
        """Peers have taken too much of something (of `ceiling.CAUSES`)."""
        self.health.resets[cause] += 1
        self.limit.warning(
            f"flooded/{cause}",
            f"too much {cause} taken: all sockets are made anew; some peer sends without end, or "
            "connects so",
        )

    def policy(self, error: PolicyError) -> None:
        """A policy raised or answered nonsense."""
        self.health.policy_errors += 1
        self.limit.warning(f"policy {error.policy}", str(error))

    def unreachable(self, error: EndpointError) -> None:
        """Nobody new can connect."""
        self.limit.warning("unreachable", f"cannot be reached: {error}")

    def observer(self, name: str, error: Exception) -> None:
        """Somebody who looks on failed."""
        self.limit.warning(f"observer {name}", f"{name}: {bug(error)}")

    def unobserved(self, requests: int) -> None:
        """Nobody will look at these requests."""
        self.health.unobserved += requests
        self.limit.warning(
            "unobserved",
            f"shadow, decision log and paths lag behind: {requests} requests left out",
        )


def bug(error: Exception) -> PeerError:
    """What a fault of ours is called. Its message may hold what a peer sent, so it is left out."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    return PeerError("internal", f"a bug of the sidecar: {type(error).__name__} at {where}")
