"""Messages as bytes: what goes in comes out, and nothing else does."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from ssd_jax.wire import codec
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import Welcome, Work
from tests.placement.process.conversation import EXPAND, PREFILL, RECORDS
from tests.placement.process.script import HELLO, drafting
from tests.wire.sample_messages import MESSAGES, SPECULATIONS, WINNER, spec_of


def again(message):
    return codec.decode(codec.encode(message), spec_of(message))


def assert_same(one, other):
    assert type(one) is type(other)
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))  # to the bit
        else:
            assert a == b


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_encoding(message):
    assert_same(again(message), message)


def test_arrays_that_lie_in_memory_in_any_way_come_back_by_value():
    tokens = np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:1, ::-1][:, :2, ::-1][..., :3]
    np.testing.assert_array_equal(again(replace(SPECULATIONS, tokens=tokens)).tokens, tokens)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_cut_of_a_message_is_refused(message):
    data = codec.encode(message)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            codec.decode(data[:size], spec_of(message))
    with pytest.raises(ProtocolError, match="trailing"):
        codec.decode(data + b"\0", spec_of(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_garbage_is_refused_or_is_a_message_and_never_anything_else(message):
    data, rng = codec.encode(message), np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        for place in rng.integers(4, len(data), rng.integers(1, 6)):
            broken[place] = rng.integers(256)
        try:
            found = codec.decode(bytes(broken), spec_of(message))
        except ProtocolError:
            refused += 1
        else:
            assert type(found) in {type(one) for one in MESSAGES}
    assert refused > 30


@pytest.mark.parametrize(
    "message", [WINNER, SPECULATIONS, RECORDS, EXPAND], ids=lambda m: type(m).__name__
)
def test_arrays_of_any_shape_in_any_place_are_refused(message):
    names = [n for n in message.__struct_fields__ if isinstance(getattr(message, n), np.ndarray)]
    shapes = [(), (0,), (1,), (0, 2**40), (1, 1), (1, 0, 3), (2, 3, 4, 1)]
    for name, shape in itertools.product(names, shapes):
        array = np.zeros(shape, getattr(message, name).dtype)
        if shape != getattr(message, name).shape:
            with pytest.raises(ProtocolError):
                again(replace(message, **{name: array}))


@pytest.mark.parametrize(
    "message", [PREFILL, WINNER, SPECULATIONS, RECORDS, EXPAND], ids=lambda m: type(m).__name__
)
def test_a_number_out_of_range_is_refused_with_the_name_of_its_array(message):
    for name in message.__struct_fields__:
        array = getattr(message, name)
        if not isinstance(array, np.ndarray) or name in ("support", "q"):  # checked when used
            continue
        unlimited = name in ("epochs", "lowered")
        for place, number in itertools.product(range(array.size), (-(2**31), 2**31 - 1)):
            changed = array.astype(np.int32)
            changed.flat[place] = number
            if number > 0 and unlimited:
                assert getattr(again(replace(message, **{name: changed})), name).max() == number
                continue
            with pytest.raises(ProtocolError, match=f"^{name} from .* not "):
                again(replace(message, **{name: changed}))


def test_no_more_is_committed_than_a_slot_holds():
    for width in (HELLO.context, HELLO.context + 1):
        longer = replace(RECORDS, committed=np.full((HELLO.slots, width), -1, np.int32))
        if width <= HELLO.context:
            assert again(longer).committed.shape[1] == width
            continue
        with pytest.raises(ProtocolError, match="committed"):
            again(longer)


def test_random_bytes_are_refused():
    rng = np.random.default_rng(2)
    for size in range(200):
        noise = rng.integers(0, 256, size, np.uint8).tobytes()
        for start in (b"", codec.encode(Welcome())[:4], codec.encode(Welcome())[:8]):
            with pytest.raises(ProtocolError):
                codec.decode(start + noise, HELLO)


def packed(body):
    return msgspec.msgpack.encode(body)


BYTES = b"\1\0\0\0"
FIELDS = ["Prefill", 1, 0, 1, 0, ["i4", [1], BYTES]]


@pytest.mark.parametrize(
    "body",
    [
        [],
        ["Prefill"],
        ["Nothing"],
        [["Prefill"], *FIELDS[1:]],
        ["Work", "grow", 0.0, 1.0],
        FIELDS[:-1],
        [*FIELDS, 1],
        ["Prefill", "1", *FIELDS[2:]],
        ["Prefill", True, *FIELDS[2:]],
        ["Prefill", 1.0, *FIELDS[2:]],
        ["Prefill", -1, *FIELDS[2:]],
        [*FIELDS[:-1], None],
        [*FIELDS[:-1], [1]],
        [*FIELDS[:-1], BYTES],
        [*FIELDS[:-1], ["O", [1], BYTES]],
        [*FIELDS[:-1], ["f4", [1], BYTES]],
        [*FIELDS[:-1], ["i4", [1], BYTES[:-1]]],
        [*FIELDS[:-1], ["i4", [1], BYTES + b"\0"]],
        [*FIELDS[:-1], ["i4", [1], "text"]],
        [*FIELDS[:-1], ["i4", [-1], BYTES]],
        [*FIELDS[:-1], ["i4", [2**62, 4], BYTES]],
        [*FIELDS[:-1], ["i4", [0, 2**63], BYTES]],
        [*FIELDS[:-1], ["i4", [2**31, 2**31, 0, 5], BYTES]],
        [*FIELDS[:-1], ["i4", ["1"], BYTES]],
        [*FIELDS[:-1], ["i4", [1, 1, 1, 1, 1], BYTES]],
        {"number": 1},
        {"type": "Prefill", "number": 1},
    ],
    ids=str,
)
def test_fields_of_another_type_number_or_size_are_refused(body):
    assert codec.decode(packed(FIELDS), HELLO).tokens.tolist() == [1]
    with pytest.raises(ProtocolError):
        codec.decode(packed(body), HELLO)


SIZE = 2**20  # bytes of a message, about as many as a real model's may have


def long_list(of, count):
    return b"\xdd" + struct.pack(">I", count) + of * count


WINNING = msgspec.msgpack.encode(["RecordTokens", 1])[1:]
SHAPE = msgspec.msgpack.encode(["Prefill", 1, 0, 1, 0, ["i4"]])[1:-4] + b"\x93\xa2i4"
SPAN = msgspec.msgpack.encode(["grow", 1, 1])
OPENING = msgspec.msgpack.encode(["Open", 1, 1])[1:] + b"\x82\xa4slot\0\xa6banned"


@pytest.mark.parametrize(
    "body",
    [
        long_list(b"\x90", SIZE),
        long_list(b"\x92\x90\xc0", SIZE // 3),
        long_list(b"\x80", SIZE),
        b"\xdf" + struct.pack(">I", SIZE),
        b"\xdd" + struct.pack(">I", 2**32 - 1),
        b"\xdb" + struct.pack(">I", SIZE) + b"a" * SIZE,
        b"\xc6" + struct.pack(">I", SIZE) + b"a" * SIZE,
        b"\x91" * SIZE,
        b"\x9b" + WINNING + long_list(b"\x90", SIZE),
        b"\x9b" + WINNING + long_list(SPAN, SIZE // len(SPAN)),
        b"\x96" + SHAPE + long_list(b"\x01", SIZE) + b"\xc4\x00",
        b"\x96" + SHAPE + b"\xdd" + struct.pack(">I", 2**32 - 1),
        b"\x96" + SHAPE + b"\x91\x01\xc6" + struct.pack(">I", 2**32 - 1),
        b"\x94" + OPENING + long_list(b"\x01", SIZE),
        b"\x94" + OPENING + long_list(b"\x91\x01", SIZE // 2),
    ],
    ids=range(15),
)
def test_a_hostile_message_takes_little_memory(body):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            codec.decode(body, HELLO)
        assert tracemalloc.get_traced_memory()[1] < 16 * SIZE
    finally:
        tracemalloc.stop()


def span(begin=1.0, end=2.0, what="grow"):
    return Work(what, begin, end)


NONE = float("nan")
IMPOSSIBLE = [
    (span(begin=NONE),),
    (span(end=NONE),),
    (span(end=float("inf")),),
    (span(begin=-1.0),),
    (span(begin=2.5),),
    (span(begin=1e11, end=1e11),),
    (span(), span(begin=1.5)),
    (span(what="sleep"),),
    (span(begin=0.0, end=0.0),) * 257,
]


@pytest.mark.parametrize("work", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
@pytest.mark.parametrize("message", [SPECULATIONS, WINNER], ids=lambda m: type(m).__name__)
def test_impossible_times_are_refused(message, work):
    assert len(again(replace(message, work=(span(), span(begin=2.0)))).work) == 2
    with pytest.raises(ProtocolError):
        again(replace(message, work=work))


@pytest.mark.parametrize(
    "spec",
    [
        drafting(HELLO, k=-1),
        drafting(HELLO, k=2**31),
        drafting(HELLO, support=-1),
        drafting(HELLO, branches=-2),
        drafting(HELLO, k="3"),
        drafting(HELLO, rule=3),
        replace(HELLO, budgets=()),
        replace(HELLO, budgets=(-1,)),
        replace(HELLO, draft_temperature=-1.0),
        replace(HELLO, drafting={}),
    ],
    ids=range(10),
)
def test_an_impossible_draft_spec_is_refused(spec):
    with pytest.raises(ProtocolError):
        again(spec)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (drafting(HELLO, k=4), "k is another: 3, not 4"),
        (replace(HELLO, dtype="bfloat16"), "dtype is another: 'float32', not 'bfloat16'"),
        (replace(HELLO, budgets=(2, 6)), "budgets is another: (6,), not (2, 6)"),
        (replace(HELLO), None),
    ],
    ids=str,
)
def test_the_field_that_differs_between_two_specs_is_named(other, words):
    assert HELLO.difference(other) == words


def test_a_vocabulary_of_any_size_fits_its_hello():
    large = replace(HELLO, tokens=2**31 - 1)
    assert codec.decode(codec.encode(large), HELLO) == large
