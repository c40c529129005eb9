"""What the rules of the model draw from."""

from hypothesis import strategies as st

from tests.model.controller import Request
from tests.model.world import RANKS
from tests.support import STALE_SECONDS

POLICIES = ("kv_affinity", "prefix_affinity", "round_robin", "total_requests", "total_tokens")
HOUR_NS = 3600 * 10**9

KEYS = st.sampled_from(["a", "b", "c", "d", "long", " ", None, None])
TEXTS = st.sampled_from([0, 7])
LENGTHS = st.sampled_from([1, 200, 3000, 20_000])
SESSIONS = st.sampled_from([None, None, None, "s", "t"])
REQUESTS = st.builds(Request, KEYS, TEXTS, LENGTHS, SESSIONS)
SOME = st.integers(1, 6)
LATE = st.integers(0, 3)
"""Which message, counted from the oldest."""
RANK = st.integers(0, RANKS - 1)
WAITS = st.sampled_from([0.001, 0.06, 0.3, 0.6, STALE_SECONDS * 1.2, 20.0])
