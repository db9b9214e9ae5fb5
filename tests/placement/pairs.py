"""Tokens per second of two ways to place the roles, in turn on the same prompts, a core each.

    python -m tests.placement.pairs hosts [--pairs=10] [--mode=ar] [--dtype=bfloat16]
    python -m tests.placement.pairs remote [--pairs=10]

`hosts`: one target over two processes, against one process that has both cores. `remote`: the draft
of mode ssd in a worker that was started by itself, over loopback, against one that the engine has
started. All processes are loaded before the first pair; the order changes from pair to pair, and
both must say the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.bench.stats import estimate_of
from tests.placement.hosts.processes import environment, free_port
from tests.placement.remote.workers import Started, listening

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a linked list.",
    "Name three uses of a paperclip.",
    "A train leaves at noon with 60 km/h. When has it gone 150 km? Think step by step.",
)
SETTINGS = {"context": 512, "slots": 1, "exact": "distribution"}
BESIDE = ("verify_ms", "hit_rate", "acceptance_length")
OF_SSD = {"mode": "ssd", "draft": "default", "k": 4, "budget": "8", "verify": "coupled"}


def answer(settings: dict[str, Any]) -> None:
    """A process that answers a prompt for every line that it is given."""
    tokens = settings.pop("max_tokens")
    temperature = settings.pop("temperature", 0.0)
    with LLM(**settings) as llm:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=0)
        llm.generate(PROMPTS[0], params)
        print(json.dumps({"choice": llm.choice}), flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            (output,) = llm.generate(json.loads(line), params)
            seconds = time.perf_counter() - began - output.metrics["ttft_ms"] / 1e3
            rate = (len(output.token_ids) - 1) / seconds
            found = {name: output.metrics[name] for name in BESIDE}
            print(json.dumps({"rate": rate, "ids": output.token_ids, **found}), flush=True)


class Answering:
    """Such a process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.placement.pairs", "--answer", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(JAX_NUM_CPU_DEVICES="1", XLA_FLAGS=""),
        )

    def read(self) -> dict[str, Any]:
        """Its next line that is one of `answer`."""
        for line in self._process.stdout or ():
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise SystemExit("it has ended without an answer")

    def ask(self, prompt: Any) -> dict[str, Any]:
        """Tokens per second behind the first token, and the ids. `prompt` is one of `generate`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        """No more prompts come."""
        self._process.communicate()


@contextlib.contextmanager
def both(what: str, given: dict[str, Any]) -> Iterator[tuple[Answering, Answering]]:
    """Processes that are ready: what is looked at, and what it is compared with."""
    with contextlib.ExitStack() as stack:
        if what == "hosts":
            address = f"127.0.0.1:{free_port()},count=2"
            follower = [sys.executable, "-m", "ssd_jax", "follower", "--target_cores=1"]
            process = subprocess.Popen(
                [*follower, f"--hosts={address},index=1"],
                env=environment(JAX_NUM_CPU_DEVICES="1", XLA_FLAGS=""),
            )
            stack.callback(process.wait)
            settings = given, {"hosts": address, "target_cores": "0"}, {"target_cores": "0,1"}
        else:
            flags = ["draft-worker", "--listen=127.0.0.1:0", "--draft=default", "--draft_cores=1"]
            worker: Started = listening([sys.executable, "-m", "ssd_jax", *flags])
            stack.callback(worker.process.wait)
            stack.callback(worker.process.terminate)
            settings = (
                given | OF_SSD,
                {"draft_placement": f"remote:{worker.address}", "target_cores": "0"},
                {"draft_placement": "process", "target_cores": "0", "draft_cores": "1"},
            )
        usual, *variants = settings
        found = tuple(Answering(SETTINGS | usual | variant) for variant in variants)
        for variant in found:
            stack.callback(variant.end)
        for variant in found:
            variant.read()
        yield found[0], found[1]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("what", nargs="?", choices=("hosts", "remote"))
    flags.add_argument("--answer", type=json.loads)
    flags.add_argument("--pairs", type=int, default=10)
    flags.add_argument("--mode", default="ar")
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--max_tokens", type=int, default=64)
    given = flags.parse_args()
    if given.answer is not None:
        answer(given.answer)
        return
    settings = {"mode": given.mode, "dtype": given.dtype, "max_tokens": given.max_tokens}
    if given.mode == "sd":
        settings |= {"draft": "default"}
    ratios: list[float] = []
    answers: tuple[list[dict[str, Any]], ...] = ([], [])
    with both(given.what, settings) as sides:
        for pair in range(given.pairs):
            prompt = PROMPTS[pair % len(PROMPTS)]
            order = (0, 1) if pair % 2 else (1, 0)
            found = {side: sides[side].ask(prompt) for side in order}
            same = found[0]["ids"] == found[1]["ids"]
            for side, of in enumerate(answers):
                of.append(found[side])
            ratios.append(found[0]["rate"] / found[1]["rate"])
            print(f"{found[0]['rate']:.1f} against {found[1]['rate']:.1f} tokens/s, "
                  f"{'the same' if same else 'OTHER'} text", flush=True)  # fmt: skip
    for name in ("rate", *BESIDE):
        values = [[answer[name] for answer in of if answer[name] is not None] for of in answers]
        if all(values):
            print(f"{name}: {' against '.join(f'{np.median(column):.3f}' for column in values)}")
    print(f"{given.what}: tokens/s of the first over those of the other, {estimate_of(ratios)}")


if __name__ == "__main__":
    main()
