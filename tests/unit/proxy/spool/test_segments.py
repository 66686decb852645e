"""The spool's frames: whole or not there, at every offset a crash could leave."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.calls.capture import CapturedCall, Gap
from proxy.spool.segments import decode_payload, encode_frame, read_frames
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
