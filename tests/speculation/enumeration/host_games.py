"""Games that the host plays with the controller, and laws of what comes out."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction

from ssd_jax.engine.requests.occurrences import Occurrences
from tests.speculation.enumeration import toys
from tests.speculation.enumeration.chance import paths
from tests.speculation.enumeration.host import outputs
from tests.speculation.enumeration.rounds import Game

GAME = Game(target=toys.TARGET2, draft=toys.DRAFT2, k=2)

# A drafted token takes .55 of a verification; branches for the likeliest bonus token alone.
FAIR = Game(target=toys.iid(1, 1), draft=toys.iid(17, 3), k=2)


def law_of(host, names, length, occurrences=Occurrences):
    """The joint law of requests that come all at once, and what their rounds were like."""
    law, seen = defaultdict(Fraction), Counter()

    def play(chance):
        found = outputs(host.engine(chance, occurrences()), names, length)
        for output in found:
            seen.update(output.metrics["miss_causes"] or {})
            seen["hit"] += bool(output.metrics["hit_rate"])
            for k, count in enumerate(output.metrics["acceptance_histogram"] or []):
                seen[k] += count
        return tuple(tuple(output.token_ids) for output in found)

    for result, _, mass in paths(play, frozenset(), lambda _key: True):
        law[result] += mass
    return dict(law), seen


def of_row(law, row):
    found = defaultdict(Fraction)
    for joint, mass in law.items():
        found[joint[row]] += mass
    return dict(found)


def seconds(count):
    return lambda _number: count
