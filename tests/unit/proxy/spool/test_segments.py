"""The spool's frames: whole or not there, at every offset a crash could leave."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.spool.segments import CapturedCall, Gap, decode_payload, encode_frame, read_frames
from store.values.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from tests.support.records import captured, reward


def test_records_come_back_as_they_were() -> None:
    gap = Gap(id=b"i" * 16, episodes=("e1", "e2"))
    records = [captured(), reward(0.5, episode="e", key="k"), gap]
    data = b"".join(encode_frame(record) for record in records)
    assert [decode_payload(payload) for _, payload in read_frames(data)] == records


def test_a_cut_at_any_byte_loses_only_the_last_record() -> None:
    first, last = encode_frame(captured()), encode_frame(captured())
    data = first + last
    for cut in range(len(first), len(data)):
        assert [end for end, _ in read_frames(data[:cut])] == [len(first)]
    assert len(list(read_frames(data))) == 2


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_never_becomes_a_record(position: int, flip: int) -> None:
    frame = bytearray(encode_frame(captured()))
    frame[position % len(frame)] ^= flip
    assert list(read_frames(bytes(frame))) == []


def test_reading_goes_on_from_an_offset() -> None:
    first, second = encode_frame(captured("a")), encode_frame(captured("b"))
    [(_, payload)] = list(read_frames(first + second, len(first)))
    record = decode_payload(payload)
    assert isinstance(record, CapturedCall)
    assert record.episode == "b"


@given(
    st.lists(st.integers(0, 2**31 - 1)),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)),
)
def test_ids_and_logprobs_are_exact(ids: list[int], logprobs: list[float]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


# What a Pawl wrote whose fields were `offers` and `asks` (before `provides` and `needs`).
WRITTEN_BEFORE = bytes.fromhex(
    "dc001ba86361707475726564c41000000000000000000000000000000007a165a36f776ea66c696b656c79a161c0"
    "a463686174a16d03a36d4033c3a8636f6d706c657465ccc8c2c4027b7dc4027b7dc291c410046f6f6f6f6f6f6f6f"
    "6f6f6f6f6f6f6f92c41001747474747474747474747474747474c41003707070707070707070707070707070c001"
    "9187a26964d92430303030303030302d303030302d303030302d303030302d303030303030303030303039a7746f"
    "6f6c5f6964a174a46e616d65a16ea6737461747573a26f6ba664657461696cc0a26d73c0a6736f75726365a66865"
    "61646572cb3fe0000000000000cb3ff8000000000000c0cb4000000000000000"
)


def test_fingerprints_of_a_spool_from_before_their_new_names_are_read() -> None:
    record = decode_payload(WRITTEN_BEFORE)
    assert isinstance(record, CapturedCall)
    assert record.provides == (b"\x04" + b"o" * 15,)
    assert record.needs == (b"\x01" + b"t" * 15, b"\x03" + b"p" * 15)
    assert (record.http_status, record.retry, record.total_ms) == (200, 1, 2.0)
    assert [event.tool_id for event in record.tool_events] == ["t"]
    # What such a spool does not have was added at the end, or by its name.
    fields = msgspec.msgpack.decode(WRITTEN_BEFORE)
    [event] = fields[22]
    event["quotes"] = []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record))[: len(fields)] == fields
    assert record.split == "train"
    assert (record.tool_grammars, record.explored, record.tool_tag) == (True, None, None)


def test_a_spool_from_before_the_last_fields_is_read() -> None:
    """Its tools' syntax, the arm of its episode and its key are then unknown, as before."""
    last = ["hermes", "canary", "0123456789abcdef"]
    call = captured(tool_tag=last[0], arm="canary", api_key=last[2])
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(call))
    assert fields[-3:] == last
    for missing in (1, 2, 3):
        old = decode_payload(msgspec.msgpack.encode(fields[:-missing]))
        assert isinstance(old, CapturedCall)
        there = last[: 3 - missing] + [None] * missing
        assert [old.tool_tag, old.arm, old.api_key] == there
