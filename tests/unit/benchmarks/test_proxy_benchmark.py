"""The pure parts of `benchmarks.proxy`: what is parsed, counted and printed."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.proxy import wire, wrk
from benchmarks.proxy.against import ratios, ratios_table
from benchmarks.proxy.figures import (
    Bar,
    Calls,
    Peer,
    Streams,
    bars,
    batched,
    combined,
    percentile,
)
from benchmarks.proxy.framing import ChunkedReply
from benchmarks.proxy.page import BEGIN, END, NoMarks, with_figures
from benchmarks.proxy.stream_server import RequestReader
from benchmarks.proxy.tables import bars_table, calls_table, streams_table

WRK = """Running 8s test @ http://127.0.0.1:46199/v1/chat/completions
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     3.00ms  591.10us  15.07ms   87.51%
    Req/Sec    21.36k     1.98k   23.83k    86.25%
  Latency Distribution
     50%  980.00us
     75%    3.15ms
     90%    3.53ms
     99%    1.20s
  170000 requests in 8.00s, 527.39MB read
Requests/sec:  21250.00
Transfer/sec:     65.89MB
"""


def calls(at_once: int, rate: float, median: float = 1.0, stored: int | None = None) -> Calls:
    return Calls(
        at_once=at_once,
        calls=1000,
        failed=0,
        calls_per_s=rate,
        median_ms=median,
        p99_ms=2.0,
        cpu_us={"serving": 100.0, "postgres": 50.0},
        stored=stored,
        drain_s=None if stored is None else 1.0,
    )


def streams(**changes: object) -> Streams:
    values: dict[str, object] = {
        "at_once": 1000,
        "started": 3000,
        "failed": {},
        "batched": 0,
        "chunks": 80_000,
        "first_median_ms": 1.0,
        "first_p99_ms": 20.0,
        "delay_median_ms": 0.5,
        "delay_p99_ms": 9.0,
        "cpu_us": {"serving": 70.0},
    }
    return Streams(**(values | changes))  # type: ignore[arg-type]


def all_peers() -> dict[str, Peer]:
    return {
        "direct": Peer("direct", calls={1: calls(1, 9000, 0.1), 64: calls(64, 60_000)}),
        "nginx": Peer(
            "nginx",
            calls={1: calls(1, 5000, 0.2), 64: calls(64, 36_000)},
            rounds_per_s=[36_000, 30_000, 36_000],
        ),
        "pawl": Peer(
            "pawl",
            calls={1: calls(1, 1400, 0.7, 1000), 64: calls(64, 4000, stored=1001)},
            rounds_per_s=[4000, 4000, 3000],
            large=calls(8, 900),
            streams={1000: streams()},
        ),
        "litellm": Peer(
            "litellm",
            "1.2.3",
            calls={1: calls(1, 50), 64: calls(64, 100)},
            rounds_per_s=[100, 100, 75],
        ),
        "agent-lightning": Peer("agent-lightning", missing="pip gave up"),
    }


def test_wrks_units_and_counts() -> None:
    seen = wrk.parse(WRK)
    assert seen == wrk.Seen(
        calls=170_000, failed=0, calls_per_s=21_250.0, median_ms=0.98, p99_ms=1200.0
    )


def test_refused_and_broken_calls_do_not_count_as_calls() -> None:
    broken = "  Socket errors: connect 1, read 2, write 3, timeout 4\n"
    refused = "  Non-2xx or 3xx responses: 17000\n"
    seen = wrk.parse(WRK.replace("Requests/sec", broken + refused + "Requests/sec"))
    assert seen.calls == 153_000
    assert seen.failed == 17_010
    assert seen.calls_per_s == pytest.approx(19_125.0)


def test_other_output_than_wrks_is_an_error() -> None:
    with pytest.raises(ValueError, match="requests in"):
        wrk.parse("wrk: command line error")


def test_the_script_sends_the_request_with_a_number_of_its_own() -> None:
    script = wrk.lua("http://127.0.0.1:80/v1/chat/completions", "run", 4000)
    before = script.partition("[==[")[2].partition("]==]")[0]
    after = script.partition("]==], [==[")[2].partition("]==]")[0]
    request = f"{before}{7:016d}{after}"
    body = request.partition("\n\n")[2]
    assert json.loads(body)["messages"][0]["content"].startswith("run 0000000000000007 xxx")
    assert f"Content-Length: {len(body)}\n" in request


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
    assert math.isnan(percentile([], 0.5))


@given(st.lists(st.floats(0, 1000), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_chunks_sent_apart_and_delivered_together_are_batched() -> None:
    assert batched([]) == 0
    assert batched([1.0]) == 0
    assert batched([1.0, 1.001]) == 0
    assert batched([1.0, 1.1, 1.101, 1.2]) == 2


def test_bars_are_judged_where_there_is_something_to_judge() -> None:
    found = {bar.name: bar for bar in bars(all_peers())}
    assert found["calls_per_nginx"].value == pytest.approx(1 / 9)
    assert found["calls_per_litellm"].holds is True
    assert found["calls_per_agent_lightning"].holds is None
    assert found["added_ms"].value == pytest.approx(0.6)
    assert found["calls_not_stored"].value == 0
    assert found["large_reply_cpu_us"].value == pytest.approx(150.0)
    assert found["chunk_delay_p99_ms"].holds is True


def test_rounds_are_added_up_and_of_their_figures_the_median_stands() -> None:
    one = combined([calls(64, rate, median, 1000) for rate, median in ((1, 9), (5, 3), (4, 1))])
    assert (one.calls, one.stored, one.drain_s) == (3000, 3000, 3.0)
    assert (one.calls_per_s, one.median_ms) == (4, 3)
    assert one.cpu_us == {"serving": 100.0, "postgres": 50.0}


def test_what_stores_nothing_stores_nothing_in_any_round() -> None:
    one = combined([calls(64, 100), calls(64, 300)])
    assert (one.calls_per_s, one.stored, one.drain_s) == (200, None, None)


def test_bars_that_do_not_hold_say_so() -> None:
    peers = all_peers()
    peers["pawl"].calls[64] = calls(64, 3000, stored=999)
    peers["pawl"].rounds_per_s = [3000, 3000, 3000]
    peers["pawl"].streams[1000] = streams(failed={"torn": 2, "status 500": 1}, batched=4)
    found = {bar.name: bar for bar in bars(peers)}
    assert found["calls_per_nginx"].holds is False
    assert found["calls_not_stored"].value == 1
    assert found["streams_failed"].value == 3
    assert found["streams_batched"].holds is False


def test_a_run_without_pawl_judges_nothing() -> None:
    assert all(bar.holds is None for bar in bars({}))


def test_what_lags_behind_is_counted_until_it_is_stored() -> None:
    assert calls(64, 1000.0, stored=1000).sustained_per_s == pytest.approx(500.0)
    assert calls(64, 1000.0).sustained_per_s == 1000.0


def test_tables_name_every_peer_and_the_missing_ones_reason() -> None:
    peers = all_peers()
    table = calls_table(peers.values()).markdown()
    assert "| pawl | 4,000 | 800 |" in table
    assert "| litellm 1.2.3 | 100 | – |" in table
    assert "| agent-lightning | missing |" in table
    assert "agent-lightning is missing: pip gave up." in table
    assert "150 (serving 100, postgres 50)" in table
    peers["pawl"].streams[1000] = streams(failed={"torn": 2})
    assert "| 2 (2 torn) |" in streams_table(peers.values()).markdown()
    assert calls_table(peers.values()).rich().row_count == len(peers)
    assert "NO" in bars_table([Bar("x", 2.0, 1.0)]).markdown()


def test_the_page_keeps_its_own_words() -> None:
    tables = [calls_table([]), streams_table([])]
    page = f"# Title\n\nWords.\n\n{BEGIN}\nold\n{END}\n\nMore.\n"
    found = with_figures(page, tables, "2 cores")
    assert found.startswith("# Title\n\nWords.\n\n")
    assert found.endswith(f"{END}\n\nMore.\n")
    assert "old" not in found
    assert "Measured on 2 cores." in found
    assert with_figures(found, tables, "2 cores") == found
    with pytest.raises(NoMarks):
        with_figures("# Title\n", tables, "2 cores")


def test_the_canned_replies_have_the_sizes_they_are_named_for() -> None:
    assert 2800 < len(wire.reply(20)) < 3000
    assert 95_000 < len(wire.reply(1240)) < 105_000
    assert len(wire.prompt("mark", 10)) < wire.SMALL_BODY - 200
    assert len(wire.prompt("mark")) > 4000


@pytest.mark.parametrize("ids", [True, False])
def test_chunks_are_events_of_vllms_size_that_say_when_they_were_written(ids: bool) -> None:
    chunk = wire.chunk(12.5, first=False, last=False, ids=ids)
    event = json.loads(chunk.removeprefix(b"data: "))
    assert 200 < len(chunk) < 400
    assert event["choices"][0]["token_ids"] == ([1234] if ids else None)
    assert (event["choices"][0]["logprobs"] is not None) is ids
    assert wire.STAMP.findall(chunk) == [b"12.500000"]
    assert bool(wire.IDS_SHOWN.search(chunk)) is ids
    first = json.loads(wire.chunk(1.0, first=True, last=True, ids=ids).removeprefix(b"data: "))
    assert ("prompt_token_ids" in first) is ids
    assert first["choices"][0]["finish_reason"] == "stop"


def test_a_chunked_reply_is_taken_apart_however_it_is_cut() -> None:
    said = [wire.chunk(1.0, first=True, last=False, ids=True), b"data: [DONE]\n\n"]
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    # A frame need not end where an event ends.
    joined = b"".join(said)
    whole += b"".join(wire.framed(piece) for piece in (joined[:100], joined[100:])) + b"0\r\n\r\n"
    for cut in range(len(whole) + 1):
        reply = ChunkedReply()
        content = reply.feed(whole[:cut])
        assert reply.ended is (cut == len(whole))
        content += reply.feed(whole[cut:])
        assert content == joined
        assert reply.ended
        assert reply.status == 200
    one_by_one = ChunkedReply()
    assert b"".join(one_by_one.feed(bytes([byte])) for byte in whole) == joined
    assert one_by_one.ended


def test_a_stream_in_another_coding_is_refused() -> None:
    with pytest.raises(ValueError, match="chunked"):
        ChunkedReply().feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    refused = ChunkedReply()
    refused.feed(b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno")
    assert refused.status == 503


def test_a_request_is_answered_once_it_is_whole() -> None:
    request = wire.post("h", "/v1/chat/completions", wire.stream_prompt("mark", 7))
    reader = RequestReader()
    assert reader.feed(request[:-1]) is None
    assert reader.feed(request[-1:]) == request
    asked = wire.TOKENS_ASKED.search(request)
    assert asked is not None
    assert int(asked[1]) == 7
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
    assert reader.feed(chunked) is None
    assert reader.feed(b"0\r\n\r\n") == chunked + b"0\r\n\r\n"


def test_two_builds_are_compared_pair_by_pair() -> None:
    """What disturbs a pair disturbs both: the median of ratios, not the ratio of medians."""

    def turn(rate: float, cpu: float) -> Calls:
        groups = {"serving": cpu, "beside": 2 * cpu, "postgres": cpu}
        return replace(calls(64, rate, median=1000 / rate), cpu_us=groups)

    pairs = [(turn(1000.0, 100.0), turn(1100.0, 90.0)), (turn(10.0, 900.0), turn(11.0, 810.0))]
    found = ratios([*pairs, (turn(100.0, 50.0), turn(50.0, 50.0))])
    assert found["calls/s"] == pytest.approx([1.1, 1.1, 0.5])
    assert found["keeper: CPU a call"] == pytest.approx([0.9, 0.9, 1.0])
    [line] = ratios_table({64: found}, "abc").lines
    assert line == [
        "64 at once",
        "1.10 (0.50 to 1.10)",
        "0.91 (0.91 to 2.00)",
        *["0.90 (0.90 to 1.00)"] * 3,
    ]
