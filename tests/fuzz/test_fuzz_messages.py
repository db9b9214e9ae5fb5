"""Mutated messages of draft workers and hosts are read or refused: no other error, no flood.

`pytest -s -m slow tests/fuzz/test_fuzz_messages.py` says how many there were.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.wire import codec
from ssd_jax.wire import host_messages as hosts
from ssd_jax.wire.fields import ProtocolError
from tests.wire.sample_messages import MESSAGES, spec_of

CASES = 300_000
MOST_MEGABYTES = 64
VALUES = [
    *(0, -1, 1, 2, 2**31 - 1, 2**31, 2**63, -(2**63), 2**64 - 1, 1e308, float("inf"), float("nan")),
    *(None, True, "", "x" * 1000, "ratio", b"", b"\0" * 64, [], [[]], [0] * 1000, {}, {"k": -1}),
    *(["i4", [2**40], b""], ["f4", [1, 1], b"\0" * 4], ["i4", [0, 2**62], b""]),
]
_ARRAY = np.array([4, -1], np.int32)
OF_HOSTS = [
    hosts.Greeting(1, "me"),
    hosts.Facts({"jax": "0.10.2"}),
    hosts.Go(),
    hosts.LeaderSettings({"mode": "sd"}, [3]),
    hosts.Refuse("no"),
    hosts.End(),
    hosts.SeenOutcome(3, 77),
    *(
        hosts.Call(1, 0, role, method, arguments)
        for role, method, *arguments in (
            ("engine", "make", "sd", 3),
            ("engine", "end"),
            ("target", "open", SlotOpening(1, SamplingParams(temperature=0.5, seed=5))),
            ("drafter", "set_pages", 1, [3, 4]),
            ("target", "prefill", 1, [5, 6], 0),
            ("drafter", "prefill", 1, [5, 6], 0, True),
            ("target", "score", 1, [5, 6]),
            ("drafter", "propose", [_ARRAY]),
            ("target", "forward", _ARRAY, _ARRAY, None, None, None),
            ("target", "forward", None, _ARRAY, _ARRAY, _ARRAY, _ARRAY),
            ("target", "prefill_last", 1, [5, 6], 0, _ARRAY),
            ("target", "read_tokens"),
            ("target", "accept", [_ARRAY], False, None),
            ("target", "accept", None, True, _ARRAY),
        )
    ),
]


def mutated(data, rng):
    """The bytes after one change, of their structure where they have one."""
    if rng.random() < 0.6:
        tree = msgspec.msgpack.decode(data, strict=False)
        place = tree
        while True:
            at = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[at]
            if not (isinstance(inner, list | dict) and inner) or rng.random() < 0.3:
                break
            place = inner
        how = rng.random()
        if how < 0.8 or isinstance(place, dict):
            place[at] = rng.choice(VALUES)
        elif how < 0.9:
            del place[at]
        else:
            place.insert(at, inner)
        return msgspec.msgpack.encode(tree)
    broken = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    cut = rng.randrange(len(broken)) if rng.random() < 0.2 else len(broken)
    return bytes(broken[:cut])


def fuzzed(cases, decode, refusals, messages):
    """Counts of what became of mutations of (bytes, what else `decode` takes), which are read."""
    found = Counter()
    for message in messages:
        decode(*message)
    for seed in range(cases):
        rng = random.Random(seed)
        data, *more = messages[seed % len(messages)]
        broken = mutated(data, rng)
        try:
            decode(broken, *more)
        except refusals:
            found["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r} of {broken[:200]!r}") from error
        else:
            found["read"] += 1
    return found


def of_a_worker(cases, decode=codec.decode):
    messages = [(codec.encode(message), spec_of(message)) for message in MESSAGES]
    return fuzzed(cases, decode, ProtocolError, messages)


def of_hosts(cases, decode=hosts.decode):
    return fuzzed(cases, decode, OSError, [(hosts.encode(message),) for message in OF_HOSTS])


@pytest.mark.parametrize("fuzz", [of_a_worker, of_hosts])
def test_every_message_can_be_mutated_and_is_read_or_refused(fuzz):
    found = fuzz(1000)
    assert min(found["refused"], found["read"]) > 20


@pytest.mark.parametrize(
    ("fuzz", "decode"), [(of_a_worker, codec.decode), (of_hosts, hosts.decode)]
)
def test_an_error_of_another_kind_is_found(fuzz, decode):
    def leaky(*arguments):
        try:
            return decode(*arguments)
        except (ProtocolError, OSError) as error:
            if "array" in str(error):
                raise ValueError("planted") from None
            raise

    with pytest.raises(AssertionError, match="planted"):
        fuzz(1000, leaky)


@pytest.mark.slow
@pytest.mark.parametrize("fuzz", [of_a_worker, of_hosts])
def test_mutated_messages_are_read_or_refused_and_take_no_memory(fuzz):
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = fuzz(CASES)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{fuzz.__name__}: {dict(found)}, {grown:.0f} MiB, {time.monotonic() - began:.0f} s")
    assert grown < MOST_MEGABYTES
