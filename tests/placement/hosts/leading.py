"""`python -m tests.placement.hosts.leading SETTINGS --hosts=...`: a leader that answers the prompts
of the tests of speculative decoding in each mode, and prints the tokens."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable

from ssd_jax.engine.request import TokenLogprobs
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from tests.fakes.grammars import Successors
from tests.llm.runs import PROMPTS, SAMPLED, ids, outputs, requests


def likeliest(entries: Iterable[TokenLogprobs | None] | None) -> list[list[int]]:
    return [[token for token, _ in entry.top] for entry in entries or () if entry is not None]


def answers(llm: LLM, verify: str, few: bool, logprobs: int | None = 2) -> dict:
    """Tokens of each prompt, or of some, by mode, and the likeliest ones beside each."""
    found = {}
    for mode in llm.modes:
        asked = requests(llm, verify, logprobs=logprobs, prompt_logprobs=logprobs)
        long = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=logprobs)  # over two pages
        longest = llm.request(PROMPTS[1], long, len(asked))
        done = outputs(llm, [*(asked[2:4] if few else asked), longest], mode)
        found[mode] = [
            [o.token_ids, likeliest(o.logprobs), likeliest(o.prompt_logprobs)] for o in done
        ]
    return found


def under_a_grammar(llm: LLM) -> dict[str, list[list[int]]]:
    """Tokens of texts that may have a few of them, in some orders, by mode."""
    letters, ends = range(40, 60), llm.tokenizer.eos_ids
    successors = {
        token: {other for other in letters if (other - token) % 3} | (ends if token > 57 else {*()})
        for token in letters
    }
    grammar = Successors({None: letters, **successors}, llm.tokenizer.size)
    found = {}
    for mode in llm.modes:
        asked = [
            dataclasses.replace(
                request,
                params=dataclasses.replace(request.params, structured_outputs={"regex": "any"}),
                grammar=grammar,
            )
            for request in (
                llm.request(prompt, SamplingParams(max_tokens=30, **sampling), index)
                for index, (prompt, sampling) in enumerate(zip(PROMPTS[:3], SAMPLED, strict=False))
            )
        ]
        found[mode] = ids(outputs(llm, asked, mode))
    return found


def main() -> None:
    settings = json.loads(sys.argv[1])
    given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[2:])
    timeout = float(given["host_timeout"])
    with LLM(**settings, hosts=given["hosts"], host_timeout=timeout) as llm:
        if given.get("grammar"):
            found = under_a_grammar(llm)
        else:
            logprobs = None if "batch_sizes" in settings else 2  # those rounds run all slots
            found = answers(llm, settings["verify"], given["few"] == "True", logprobs)
            (alone,) = llm.generate("a", SamplingParams(max_tokens=9), mode="ar")
            found["predicted"] = llm.predicted
            found["batches"] = alone.metrics["batch_sizes"]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
