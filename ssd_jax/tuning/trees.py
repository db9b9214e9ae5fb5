"""Loads trees of mode sd to measure them beside the chain, and the one that is chosen."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from ssd_jax.devices.opening.exactness import tree_agrees
from ssd_jax.loading.load import Status, load_tree
from ssd_jax.loading.loaded import Loaded, Roles
from ssd_jax.tuning.chooser import Chooser
from ssd_jax.tuning.measuring import rounds_of, shortest_seconds
from ssd_jax.tuning.role_runs import Clock
from ssd_jax.tuning.tree_choice import OTHER_BITS

_NO_RANKS = "verify = {!r} counts no ranks for requests that are sampled by default"
_NO_ROOM = "context = {} has no room to measure rounds"


def choose_tree(
    loaded: Loaded, chooser: Chooser, temperature: float, status: Status | None = None
) -> Loaded:
    """What runs the chain or the tree that `chooser` takes.

    Args:
      loaded: with chains.
      temperature: of requests that come without one.
      status: see `Status`.
    """
    config, k = loaded.config, max(loaded.resolved.ks)
    if not config.counts_ranks(temperature):
        chooser.take_chain(_NO_RANKS.format(config.verify))
        return loaded
    if config.speculated not in chooser.costs.rounds:
        chooser.take_chain(_NO_ROOM.format(loaded.resolved.context))
        return loaded

    @functools.cache
    def open_tree(nodes: int) -> Loaded:
        return load_tree(loaded, nodes, status)

    @functools.cache
    def is_exact(nodes: int) -> bool:
        if loaded.exact == "distribution":
            return True
        tree, narrow = open_tree(nodes), 0 in loaded.programs.widths
        return narrow and tree_agrees(tree.programs, tree.parameters)

    def measure(nodes: int) -> float | None:
        return measure_tree(loaded, open_tree(nodes)) if is_exact(nodes) else None

    nodes = chooser.choose_tree([nodes for nodes in config.trees if nodes > k], measure)
    if not nodes:
        return loaded
    if not is_exact(nodes):
        chooser.take_chain(OTHER_BITS)
        return loaded
    return open_tree(nodes)


def measure_tree(chain: Loaded, tree: Loaded, *, clock: Clock = time.perf_counter) -> float:
    """How many times as long as one with the chain a round with a tree takes, in turns."""
    k, runs, role_sets = chain.config.speculated, {}, []
    for name, loaded in (("chain", chain), ("tree", tree)):
        roles = loaded.roles("sd", k)
        role_sets.append(roles)
        runs[name, k] = round_run(loaded, roles, clock)
    seconds = shortest_seconds(runs, clock)
    for roles in role_sets:
        roles.close()
    return seconds["tree", k] / seconds["chain", k]


def round_run(loaded: Loaded, roles: Roles, clock: Clock) -> Callable[[], float]:
    """A function that runs a round of K tokens, or of a tree, and returns its seconds."""
    rounds, k = rounds_of(loaded, roles, clock), loaded.config.speculated

    def run() -> float:
        rounds.begin(k)
        return rounds.run()

    return run
