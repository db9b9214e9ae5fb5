"""Where there are no token trees."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.errors import InputError
from ssd_jax.roles.drafting import MAX_BRANCHING_DEPTH, RANKS
from ssd_jax.sampling.rules import RULES


def check(settings: DerivedSettings) -> None:
    """Refuses a tree where there is none, or that is no tree."""
    if not settings.tree_nodes:
        return
    tree = f"tree_nodes = {settings.tree_nodes!r}"
    if settings.mode not in ("sd", "ssd"):
        raise InputError(
            f"{tree} is for mode = 'sd' and 'ssd', and this is {settings.mode!r}; leave it out, or "
            "change the mode"
        )
    if settings.chooses_k:
        raise InputError(
            f"{tree} needs a number for k, the longest path, and here it is chosen while "
            "decoding; give k, such as 4"
        )
    if settings.chooses_tree and settings.hosts is not None:
        raise InputError(
            f"{tree} is measured at the start, and with hosts = {settings.hosts!r} other processes "
            "would have to follow; give a number"
        )
    if max(settings.trees) <= settings.speculated:
        raise InputError(
            f"{tree} leaves no node beside a chain of k = {settings.speculated}; give more nodes, "
            "or lower k"
        )
    if settings.speculated == 1 and max(settings.trees) > RANKS:
        raise InputError(
            f"{tree} is more than the {RANKS} nodes that a tree of paths of k = 1 may have; "
            "give no more, or raise k"
        )
    if settings.mode == "ssd":
        _check_branching(settings)


def _check_branching(settings: DerivedSettings) -> None:
    """Refuses what trees do not have in mode ssd."""
    tree = f"tree_nodes = {settings.tree_nodes!r} in mode = 'ssd'"
    if settings.chooses_tree:
        raise InputError(
            f"{tree} would measure trees at the start, and the draft, which may run elsewhere, is "
            "compiled for one size of them; give a number of nodes"
        )
    if settings.speculated > MAX_BRANCHING_DEPTH:
        raise InputError(
            f"{tree} has paths of up to k = {MAX_BRANCHING_DEPTH} tokens, and k is "
            f"{settings.speculated}; lower it"
        )
    chains: dict[str, object] = {
        "fan_out": settings.fan_out,
        "predict": settings.predict if RULES[settings.verify].keyed_by_position else None,
        "saguaro_c": settings.saguaro_c if settings.saguaro_c != 1 else None,
        "budget": settings.budget if settings.budget == "auto" else None,
    }
    for name, value in chains.items():
        if value is not None:
            raise InputError(
                f"{name} = {value!r} is for chains, and {tree} has none; leave out one"
            )
