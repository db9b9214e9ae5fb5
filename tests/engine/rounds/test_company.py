"""Figures of a request that has others beside it: scripted rounds, by a scripted clock."""

from __future__ import annotations

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget, Letters
from tests.engine.letters import drain, outputs, request, spell
from tests.fakes.instrument import instrument
from tests.fakes.watch import Watch

LONG = "".join(chr(97 + index % 26) for index in range(50))


class Scripted:
    """An engine and its clock: a program takes 10 s, a proposal 1 s before it.

    The draft is busy for 1 s a token of a prompt, while it proposes, and beside every verification.
    """

    def __init__(self, **more):
        self.watch, self.spans, engine = Watch(), [], self

        class Drafter(FakeDrafter):
            drafted = None

            def prefill(self, slot, tokens, offset, *, last):
                super().prefill(slot, tokens, offset, last=last)
                engine.work("prefill", len(tokens), [slot])

            def propose(self, batch):
                self.drafted, self.slots = super().propose(batch), list(batch.slots)
                self.drafted.sources = dict.fromkeys(self.slots, "hit")
                engine.work("promote", 1, self.slots)
                engine.watch.now += 1
                return self.drafted

            def speculate(self):
                if self.drafted is not None:
                    done = [span for span in engine.spans if span.end <= engine.watch.now]
                    self.drafted.activity, self.drafted = Activity(tuple(done)), None
                    engine.spans = [span for span in engine.spans if span.end > engine.watch.now]
                    engine.work("grow", 10, self.slots)

        script = spell(LONG)
        self.engine = Engine(
            instrument(FakeTarget(script), delay={"read": 10.0}, watch=self.watch),
            Letters,
            frozenset(),
            drafter=Drafter(script, wrong=lambda _: True),
            clock=self.watch,
            **more,
        )

    def work(self, what, seconds, slots):
        self.spans.append(Busy(what, self.watch.now, self.watch.now + seconds, slots))


def figures(*, beside):
    """Of a request whose prompt runs in six chunks, by itself or beside one that decodes."""
    scripted = Scripted()
    if beside:
        scripted.engine.add(request(max_tokens=30))
        for _ in range(3):
            scripted.engine.step()
    asked = scripted.engine.add(request([66] * 24, max_tokens=5))
    return outputs(drain(scripted.engine))[asked].metrics


def test_work_for_a_prompt_beside_rounds_of_others_is_in_the_hidden_share():
    # Three proposals are exposed. Alone, nothing is told in the last round, which proposes nothing.
    for beside, verifications in ((False, 2), (True, 3)):
        hidden = 24 + 10 * verifications
        assert figures(beside=beside)["hidden_draft_share"] == hidden / (hidden + 3)


def test_a_verification_is_timed_from_its_own_dispatch_although_a_prompt_came_before():
    scripted = Scripted()
    first = scripted.engine.add(request(max_tokens=9))
    scripted.engine.step()
    scripted.engine.add(request([66] * 40, max_tokens=2))
    assert outputs(drain(scripted.engine))[first].metrics["verify_ms"] == 10_000


def test_no_verification_counts_as_idle_after_the_request_was_put_off():
    pages = PageStock(slots=2, count=10, size=4, beyond=4, context=64, grows=True)
    scripted = Scripted(pages=pages)
    for prompt in (66, 67):
        scripted.engine.add(request([prompt] * 6, max_tokens=24))
    metrics = outputs(drain(scripted.engine))[1].metrics
    assert (metrics["preemptions"], metrics["verify_idle_ms"]) == (1, None)
