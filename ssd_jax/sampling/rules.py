"""Verification rules by name, and what the rest of the package has to know about each.

A question about the rule is asked here, of the record; nothing else compares names. How a rule
judges is in `judgement`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

RuleName = Literal["ratio", "block", "coupled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a verification rule needs and promises.

    Attributes:
      ships_q: it reads q, which is therefore stored with a proposal and travels with it.
      keyed_by_position: target and draft draw a token with the noise of its absolute position, so
        that the text does not depend on what is proposed, and is the same in every mode. Else the
        shape of a sampled row's tree may not depend on what was drawn.
      timed: sampled text depends on the lengths of proposals. Where these depend on time, requests
        of one seed and index need different noise, and lengths that one request taught must not
        reach another of the same noise.
      lossy: the text does not have the target's distribution.
    """

    name: RuleName
    ships_q: bool
    keyed_by_position: bool
    timed: bool
    lossy: bool = False


_ALL = (
    Rule(name="ratio", ships_q=True, keyed_by_position=False, timed=True),
    Rule(name="block", ships_q=True, keyed_by_position=False, timed=True),
    Rule(name="coupled", ships_q=False, keyed_by_position=True, timed=False),
)
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})
"""All rules by their names."""
