"""The sidecar process is replaced while a real SGLang server answers requests."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

from sidecar.hashing import key_hash, preferred

from .conftest import RANKS, eventually

SESSIONS = 8
REPLACEMENTS = 3


def test_no_request_fails_and_no_session_moves(live):
    """Chats go on all the time, several at once; each sidecar decides some of them."""
    keys = [f"replaced-{i}" for i in range(SESSIONS)]
    homes = {key: preferred(key_hash(key.encode()), range(RANKS)) for key in keys}
    stop, deciders = [], []

    def chat_on(key: str) -> int:
        turns = 0
        while not stop:
            assert live.rank_of(live.chat(key, f"turn {turns} " + "the of " * 50)) == homes[key]
            turns += 1
        return turns

    with ThreadPoolExecutor(SESSIONS) as pool:
        chats = [pool.submit(chat_on, key) for key in keys]
        try:
            for _ in range(REPLACEMENTS):
                old = live.sidecar.process
                live.sidecar.process = subprocess.Popen(
                    [*old.args, "--take-over"] if "--take-over" not in old.args else old.args,
                    stdout=live.sidecar.log,
                    stderr=live.sidecar.log,
                )
                assert old.wait(30) == 0
                assert eventually(lambda: (live.status() or {}).get("decisions"))
                deciders.append(live.sidecar.process.pid)
        finally:
            stop.append(True)
        turns = [chat.result(60) for chat in chats]
    assert min(turns) >= 1, turns
    assert len(set(deciders)) == REPLACEMENTS
    causes = {"unreachable", "deadline", "breaker_open"}
    # Told anew to each sidecar; the server may have been through other tests, with sessions.
    assert set(live.status()["bypassed"]) <= causes | {"session"}
    assert live.settle()
