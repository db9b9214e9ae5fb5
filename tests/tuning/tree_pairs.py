"""Tokens per second of `--tree_nodes=auto` beside the chain and trees taken by hand, in turn.

    python -m tests.tuning.tree_pairs [--temperature=1] [--starts=2] [--prompts=mt_bench:4]

Each way has a process of its own, which waits while another one answers. They are loaded one after
the other, since `auto` measures as it loads, and the order changes from prompt to prompt. All must
say the same. Not run by pytest.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ssd_jax.tools.bench.prompts import load_prompts
from tests.placement.pairs import Answering

BY_HAND = (0, 7, 15)
"""Nodes; 0 is the chain."""
WAYS = ("auto", *BY_HAND)


def started(settings: dict[str, Any], first: int) -> dict[str | int, Answering]:
    """A process for each way, ready; `first` says which one is loaded first."""
    processes: dict[str | int, Answering] = {}
    for way in (*WAYS[first:], *WAYS[:first]):
        processes[way] = Answering({**settings, "tree_nodes": way})
        choice = processes[way].read()["choice"]
        if choice:
            print(choice, flush=True)
    return processes


def report(rates: dict[str | int, list[float]]) -> None:
    """Rates of all texts of one length, and quotients of pairs with quartiles."""
    together = {way: statistics.harmonic_mean(found) for way, found in rates.items()}
    better = max(BY_HAND, key=lambda nodes: together[nodes])
    for way, rate in together.items():
        quotients = [one / other for one, other in zip(rates["auto"], rates[way], strict=True)]
        low, middle, high = statistics.quantiles(quotients, n=4)
        print(
            f"{way}: {rate:.1f} tokens/s; auto over it {together['auto'] / rate:.3f}, "
            f"of pairs {middle:.3f} ({low:.3f} to {high:.3f}; {len(quotients)})"
            + ("; the better one by hand" if way == better else ""),
            flush=True,
        )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--temperature", type=float, default=0.0)
    flags.add_argument("--starts", type=int, default=2)
    flags.add_argument("--prompts", default="mt_bench:4,humaneval:4,gsm8k:4")
    flags.add_argument("--target")
    flags.add_argument("--draft", default="default")
    flags.add_argument("--dtype", default="native")
    flags.add_argument("--k", type=int, default=4)
    given = flags.parse_args()
    settings: dict[str, Any] = {"mode": "sd", "draft": given.draft, "k": given.k}
    settings |= {"verify": "coupled", "dtype": given.dtype, "context": 1024, "slots": 1}
    settings |= {"temperature": given.temperature, "exact": "auto", "max_tokens": 64}
    if given.target:
        settings |= {"target": given.target, "draft_dtype": given.dtype}
    rates: dict[str | int, list[float]] = {way: [] for way in WAYS}
    for start in range(given.starts):
        processes = started(settings, start % len(WAYS))
        for place, prompt in enumerate(load_prompts(given.prompts)):
            turn = (place + start) % len(WAYS)
            answers = {
                way: processes[way].ask(prompt.content) for way in (*WAYS[turn:], *WAYS[:turn])
            }
            texts = {tuple(answer["ids"]) for answer in answers.values()}
            if len(texts) > 1:
                print(f"OTHER texts of prompt {place}")
            for way, answer in answers.items():
                rates[way].append(answer["rate"])
        for process in processes.values():
            process.end()
        report(rates)


if __name__ == "__main__":
    main()
