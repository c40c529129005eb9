"""Requests over HTTP, ranks from the sidecar, load reports back. In the order of the file."""

from importlib.metadata import version

import requests
from prometheus_client.parser import text_string_to_metric_families

from sidecar.hashing import key_hash, preferred

from .conftest import RANKS, eventually

LONG = "the of and to " * 200


def home(key: str) -> int:
    return preferred(key_hash(key.encode()), range(RANKS))


def test_warm_up_reached_every_rank_and_the_hook_is_visible(live):
    assert not live.status()["bypassed"]
    assert live.settle()
    assert all(rank["sent"] >= 1 for rank in live.status()["ranks"])
    about = live.status()["about"]
    assert about["sglang"] == version("sglang")
    assert about["method"] == "round_robin"
    assert live.status()["abstained"]["warm_up"] == RANKS
    assert not live.status()["bypassed"], "the first request found the sidecar connected"


def test_every_turn_of_a_session_lands_on_its_rank(live):
    for turn in range(3):
        for key in (f"session-{i}" for i in range(8)):
            response = live.chat(key, LONG * (turn + 1))
            assert live.rank_of(response) == home(key)
            details = response.json()["usage"]["prompt_tokens_details"] or {}
            assert turn == 0 or details["cached_tokens"] >= 700 * turn
    assert live.status()["decisions"] == {"prefix_affinity": {"affinity_hit": 25}}


def test_a_streamed_answer_too(live):
    with live.chat("streamed", LONG, stream=True, return_meta_info=False) as response:
        lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
    assert len(lines) >= 2
    request_id = requests.models.complexjson.loads(lines[0][6:])["id"]
    assert live.ranks()[request_id] == home("streamed")


def test_all_prompts_of_a_batch_and_all_samples_keep_the_key(live):
    before = set(live.ranks())
    response = live.generate(text=[f"{LONG} {i}" for i in range(4)], routing_key="batch")
    assert response.status_code == 200
    batch = {rid: rank for rid, rank in live.ranks().items() if rid not in before}
    assert len(batch) == 4
    assert set(batch.values()) == {home("batch")}
    before |= set(batch)
    assert len(live.chat("samples", LONG, n=4).json()["choices"]) == 4
    samples = {rid: rank for rid, rank in live.ranks().items() if rid not in before}
    assert len(samples) >= 4
    assert set(samples.values()) == {home("samples")}


def test_without_a_key_the_prompt_decides(live):
    texts = [f"number {'the ' * (i + 1)} {LONG}" for i in range(8 * RANKS)]
    first = [live.rank_of(live.chat(None, text)) for text in texts]
    again = [live.rank_of(live.chat(None, text)) for text in texts]
    assert first == again
    assert set(first) == set(range(RANKS))
    assert live.rank_of(live.chat("", texts[0])) == first[0], "an empty key is no key"


def test_an_explicit_rank_is_obeyed(live):
    for rank in range(RANKS):
        assert live.rank_of(live.chat("pinned", LONG, routed_dp_rank=rank)) == rank
    assert eventually(
        lambda: live.chat("other", "x") and live.status()["abstained"].get("pinned") == RANKS
    )


def test_health_checks_are_answered(live):
    assert requests.get(f"{live.server.base_url}/health_generate", timeout=30).status_code == 200
    assert live.settle()


def test_a_client_that_goes_away_leaves_no_load(live):
    for i in range(4):
        stream = live.chat(f"gone-{i}", LONG, stream=True, max_tokens=500, return_meta_info=False)
        next(stream.iter_content(16))
        stream.close()
    assert live.settle()


def test_metrics_tell_the_story_without_keys(live):
    live.chat("secret-key-of-a-user", LONG)
    text = live.metrics()
    assert "secret-key" not in text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    names = {name for name, _ in samples}
    prefix = "sglang_dp_sidecar_"
    for name in ("decisions_total", "affinity_hits_total", "bypassed_total", "query_seconds_sum"):
        assert any(n == prefix + name for n in names) or name == "bypassed_total"
    ages = [v for (name, _), v in samples.items() if name == prefix + "report_age_seconds"]
    assert len(ages) == RANKS
    assert max(ages) < 5
    [info] = [dict(labels) for name, labels in samples if name == prefix + "instance_info"]
    assert info["sglang_version"] == version("sglang")


def test_killed_and_restarted_in_mid_stream_nothing_fails_or_moves(live):
    keys = [f"session-{i}" for i in range(8)]
    live.sidecar.kill()
    for key in keys:
        assert live.rank_of(live.chat(key, LONG)) == home(key)
    assert live.chat(None, LONG).status_code == 200
    live.sidecar.start()

    def decided_again():
        assert live.rank_of(live.chat(keys[0], LONG)) == home(keys[0])
        return live.status().get("decisions")

    assert eventually(decided_again)
    for key in keys:
        assert live.rank_of(live.chat(key, LONG)) == home(key)
    bypassed = live.status()["bypassed"]
    assert sum(bypassed.values()) >= len(keys) + 1
    assert live.settle(), "the new sidecar knows the exact load"


def test_a_stopped_sidecar_is_not_waited_for(live):
    import signal

    waited = live.status()["bypassed"].get("deadline", 0)
    live.sidecar.process.send_signal(signal.SIGSTOP)
    try:
        for i in range(8):
            key = f"session-{i}"
            assert live.rank_of(live.chat(key, LONG)) == home(key)
    finally:
        live.sidecar.process.send_signal(signal.SIGCONT)
    before = sum(live.status()["bypassed"].values())

    def told():
        live.chat("session-0", LONG)
        return sum(live.status()["bypassed"].values()) > before

    eventually(told)
    causes = live.status()["bypassed"]
    assert causes["deadline"] == waited + 1, "one request waited, the others did not"
    assert causes["breaker_open"] >= 6


def test_the_log_holds_one_line_of_ours_a_process_and_no_error(live):
    lines = [line for line in live.server.log_path.read_text().splitlines() if "dp_sidecar" in line]
    assert not [line for line in lines if "ERROR" in line.upper() and "dp_sidecar:" in line]
    assert sum("attached to the controller" in line for line in lines) == 1
