"""Messages as bytes: what goes in comes out, and nothing else does."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest

from ssd_jax.runtime.worker import codec
from ssd_jax.runtime.worker.messages import (
    Ping,
    ProtocolError,
    Refused,
    Speculations,
    Stats,
    Welcome,
    Winner,
    Work,
)
from tests.runtime.worker.scripted import HELLO
from tests.runtime.worker.test_session import OPEN, PREFILL, ROUND

RNG = np.random.default_rng(7)
WINNER = Winner(
    number=2**40,
    slots=np.array([0, 3], np.int32),
    epochs=np.array([5, 6], np.int32),
    lengths=np.array([1, 2], np.int32),
    tokens=RNG.integers(0, 2**31 - 1, (2, 3), np.int32),
    confidence=RNG.integers(-1, 8, (2, 3), np.int32),
    sampled=(3,),
    support=RNG.integers(-1, 9, (1, 3, 4)).astype(np.int32),
    q=RNG.random((1, 3, 4), np.float32),
)
SPECULATIONS = Speculations(
    number=8,
    complete=True,
    slots=np.array([1], np.int32),
    epochs=np.array([1], np.int32),
    bonus=np.array([[4, -1]], np.int32),
    lengths=np.array([[2, 0]], np.int32),
    tokens=np.arange(6, dtype=np.int32).reshape(1, 2, 3),
    confidence=np.array([[[7, 0, -1], [-1, -1, -1]]], np.int32),
)
MESSAGES = [
    HELLO,
    Welcome(),
    Refused(reason="ünlike"),
    OPEN,
    PREFILL,
    ROUND,
    dataclasses.replace(ROUND, moves=(), expand=None),
    WINNER,
    dataclasses.replace(WINNER, work=(Work(what="grow", begin=0.1, end=1e9),) * 2),
    dataclasses.replace(WINNER, sampled=(), support=WINNER.support[:0], q=WINNER.q[:0]),
    SPECULATIONS,
    Ping(number=1),
    Stats(number=1, rounds=2, forwards=3, cut=4, stale=5, busy=0.5, clock=1e5),
]


def assert_same(one, other):
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))  # to the bit
        else:
            assert a == b


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    assert_same(codec.decode(codec.encode(message)), message)


def test_arrays_that_lie_in_memory_in_any_way_come_back_by_value():
    tokens = np.arange(12, dtype=np.int64).reshape(2, 6)[::-1, ::2]
    found = codec.decode(codec.encode(dataclasses.replace(SPECULATIONS, bonus=tokens)))
    np.testing.assert_array_equal(found.bonus, tokens)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_cut_of_a_message_is_refused(message):
    data = codec.encode(message)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            codec.decode(data[:size])
    with pytest.raises(ProtocolError, match="too many"):
        codec.decode(data + b"\0")


def test_another_version_is_named():
    data = bytearray(codec.encode(Welcome()))
    data[3] += 1
    with pytest.raises(ProtocolError, match=f"version {data[3]} .* version {codec.VERSION}"):
        codec.decode(bytes(data))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_garbage_is_refused_or_is_a_message_and_never_anything_else(message):
    data, rng = codec.encode(message), np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        for place in rng.integers(4, len(data), rng.integers(1, 6)):
            broken[place] = rng.integers(256)
        try:
            found = codec.decode(bytes(broken))
            if isinstance(found, Stats):
                found.check()
            elif hasattr(found, "check"):
                found.check(HELLO)
        except ProtocolError:
            refused += 1
        else:
            assert type(found) in {type(one) for one in MESSAGES}
    assert refused > 30


@pytest.mark.parametrize("message", [WINNER, SPECULATIONS], ids=lambda m: type(m).__name__)
def test_arrays_of_any_shape_in_any_place_are_refused(message):
    arrays = [f.name for f in dataclasses.fields(message) if f.type == "np.ndarray"]
    shapes = [(), (0,), (1,), (0, 2**40), (1, 1), (1, 0, 3), (2, 3, 4, 1)]
    for name, shape in itertools.product(arrays, shapes):
        array = np.zeros(shape, np.int32)
        if shape == getattr(message, name).shape:
            continue
        with pytest.raises(ProtocolError):
            dataclasses.replace(message, **{name: array}).check(HELLO)


def test_noise_is_refused():
    rng = np.random.default_rng(2)
    for size in range(200):
        noise = rng.integers(0, 256, size, np.uint8).tobytes()
        for start in (b"", codec.encode(Welcome())[:4], codec.encode(Welcome())[:8]):
            with pytest.raises(ProtocolError):
                codec.decode(start + noise)


def packed(header, rest=b""):
    body = msgpack.packb(header)
    return b"SSD" + bytes([codec.VERSION]) + struct.pack("<I", len(body)) + body + rest


FIELDS = [1, 0, 1, 0, ["i4", [1]]]


@pytest.mark.parametrize(
    "header",
    [
        [],
        ["Prefill"],
        ["Nothing", []],
        [["Prefill"], FIELDS],
        ["Move", []],
        ["Prefill", FIELDS[:-1]],
        ["Prefill", [*FIELDS, 1]],
        ["Prefill", ["1", 0, 1, 0, ["i4", [1]]]],
        ["Prefill", [True, 0, 1, 0, ["i4", [1]]]],
        ["Prefill", [1.0, 0, 1, 0, ["i4", [1]]]],
        ["Prefill", [1, 0, 1, 0, None]],
        ["Prefill", [1, 0, 1, 0, ["O", [1]]]],
        ["Prefill", [1, 0, 1, 0, ["i4", [-1]]]],
        ["Prefill", [1, 0, 1, 0, ["i4", [2**62, 4]]]],
        ["Prefill", [1, 0, 1, 0, ["i4", [0, 2**63]]]],
        ["Prefill", [1, 0, 1, 0, ["i4", [2**31, 2**31, 0, 5]]]],
        ["Prefill", [1, 0, 1, 0, ["i4", ["1"]]]],
        ["Prefill", [1, 0, 1, 0, ["i4", [1, 1, 1, 1, 1]]]],
        ["Prefill", {"number": 1}],
    ],
    ids=str,
)
def test_fields_of_another_type_number_or_size_are_refused(header):
    codec.decode(packed(["Prefill", FIELDS], b"\1\0\0\0"))
    with pytest.raises(ProtocolError):
        codec.decode(packed(header, b"\1\0\0\0"))


SIZE = 2**20  # bytes of a header, about as many as a real model's may have


def long_list(of, count):
    return b"\xdd" + struct.pack(">I", count) + of * count


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (long_list(b"\x90", SIZE), "too many lists"),
        (long_list(b"\x92\x90\xc0", SIZE // 3), "too many lists"),
        (long_list(b"\x80", SIZE), "a map"),
        (b"\xdf" + struct.pack(">I", SIZE), "exceeds max_map_len"),
        (b"\xdd" + struct.pack(">I", 2**32 - 1), "exceeds max_array_len"),
        (b"\xdb" + struct.pack(">I", SIZE) + b"a" * SIZE, "exceeds max_str_len"),
        (b"\xc6" + struct.pack(">I", SIZE) + b"a" * SIZE, "exceeds max_bin_len"),
        (b"\x91" * SIZE, "StackError"),
    ],
    ids=range(8),
)
def test_a_hostile_header_takes_little_memory(body, words):
    data = b"SSD" + bytes([codec.VERSION]) + struct.pack("<I", len(body)) + body
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=words):
            codec.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 16 * SIZE
    finally:
        tracemalloc.stop()


def test_an_opening_that_biases_every_token_of_a_large_vocabulary_is_no_hostile_header():
    biases = tuple((token, -1.5) for token in range(50_000))
    large = dataclasses.replace(OPEN, logit_bias=biases)
    assert_same(codec.decode(codec.encode(large)), large)
