from bench.live import counters


def text(spills, hits, slow=0, other=0):
    """As the sidecar's /metrics, cut down."""
    prefix = "sglang_dp_sidecar_"
    return f"""
# TYPE {prefix}spills counter
{prefix}spills_total{{instance="a",from_rank="0",to_rank="1"}} {spills}
{prefix}spills_total{{instance="a",from_rank="1",to_rank="1"}} 4
{prefix}spills_total{{instance="b",from_rank="0",to_rank="1"}} {other}
# TYPE {prefix}affinity_hits counter
{prefix}affinity_hits_total{{instance="a",key="routing_key"}} {hits}
# TYPE {prefix}fallbacks counter
{prefix}fallbacks_total{{instance="a"}} 1
# TYPE {prefix}query_seconds histogram
{prefix}query_seconds_bucket{{le="1e-05"}} {hits}
{prefix}query_seconds_bucket{{le="0.001"}} {hits}
{prefix}query_seconds_bucket{{le="+Inf"}} {hits + slow}
# TYPE {prefix}bypassed counter
{prefix}bypassed_total{{instance="a",cause="deadline"}} {spills}
"""


def between(before, after):
    return counters.read_sidecar(before, "a"), counters.read_sidecar(after, "a")


def test_what_rose_in_between():
    found = counters.decided(*between(text(2, 10), text(5, 110, slow=5, other=99)))
    assert found["spills"] == {"0>1": 3}
    assert found["affinity_hits"] == {"routing_key": 100}
    assert found["fallbacks"] == 0
    assert found["decisions"] == {}
    assert found["decision_us"] == {"p50": 10.0, "p90": 10.0, "p99": 1000.0}
    assert counters.told(*between(text(2, 10), text(5, 10)))["bypassed"] == {"deadline": 3}


def test_a_sidecar_restarted_in_between():
    found = counters.decided(*between(text(5, 110), text(2, 10)))
    assert found["spills"] is None
    assert found["affinity_hits"] is None
    assert found["decision_us"] is None


def test_nothing_was_asked():
    assert counters.decided(*between(text(2, 10), text(2, 10)))["decision_us"] is None
    assert counters.decided({}, {})["spills"] == {}


def test_engine_counters():
    before = {"prompt_tokens_total": 100.0, "cached_tokens_total": 10.0}
    after = {"prompt_tokens_total": 300.0, "cached_tokens_total": 60.0}
    rise = counters.engine_rise(before, after)
    assert rise == {
        "prompt_tokens_total": 200.0,
        "cached_tokens_total": 50.0,
        "cached_share": 0.25,
    }
    assert counters.engine_rise(None, after)["cached_share"] == 0.2
    assert counters.engine_rise(before, None) is None
    assert "cached_share" not in counters.engine_rise(before, before)


def test_steps_of_simulated_ranks():
    before = {"seconds": 10.0, "worked_seconds": 10.0, "late_seconds": 0.0}
    after = {"seconds": 20.0, "worked_seconds": 17.5, "late_seconds": 1.0}
    assert counters.steps_rise(before, after) == {"idle_share": 0.25, "late_share": 0.1}
    assert counters.steps_rise(None, after) is None
    assert counters.steps_rise(after, after) is None
