"""An engine on scripted roles whose tokens are letters."""

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters

EOS, OTHER_EOS = 1, 2
LONG = "the quick brown fox jumps over the lazy dog"


def spell(text, eos=EOS):
    """A script that writes `text`, then EOS for ever."""
    ids = [ord(letter) for letter in text]

    def script(prompt, position):
        index = position - len(prompt)
        return ids[index] if index < len(ids) else eos

    return script


def make(script, **room):
    target = FakeTarget(script, **room)
    return target, Engine(target, Letters, frozenset({EOS, OTHER_EOS}), clock=Clock())


def request(prompt=(65, 66, 67), index=0, **params):
    return Request(prompt_ids=prompt, params=SamplingParams(**params), index=index)


def drain(engine, limit=500):
    events = []
    for _ in range(limit):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def outputs(events):
    return {event.request_id: event.output for event in events if event.output is not None}


def ids(text):
    return [ord(letter) for letter in text]


def speculate(script, *, k=3, wrong=lambda position: False, length=lambda position: 16, **room):
    """A target and an engine whose drafter knows the script, and errs where `wrong` says."""
    target = FakeTarget(script, **room)
    drafter = FakeDrafter(script, k=k, slots=target.slots, wrong=wrong, length=length)
    engine = Engine(target, Letters, frozenset({EOS, OTHER_EOS}), drafter=drafter, clock=Clock())
    return target, drafter, engine
