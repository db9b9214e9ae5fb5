"""Writes `tests/goldens/smollm2-llama.cpp.json`: SmolLM2's first greedy tokens by llama.cpp.

    python tests/oracle/make_llama_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs the package llama-cpp-python (built from source; the README beside this file says how).
Nothing of ssd_jax is imported: the chat template, the tokens of the prompt and those that follow
are llama.cpp's. With each greedy token goes its margin, which is how far its logit is above that
of the next likeliest one: at a small one, another arithmetic may choose another token.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "smollm2-llama.cpp.json"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEW_TOKENS = 16
CONVERSATIONS = (  # contents, the user's first, then by turns
    ("What is the capital of France?",),
    ("List the four seasons of the year.",),
    ("Correct the sentence: She go to school yesterday.",),
    ("Write a for loop in Python that prints the numbers from 1 to 10.",),
    ("Explain photosynthesis in one sentence.",),
    ("A train goes 60 miles in 1.5 hours. How fast is it? Show every step.",),
    ("Complete the function.\n\n```python\ndef is_prime(n: int) -> bool:\n    if n < 2:\n```",),
    ('Return this as JSON with the keys "name" and "age": Ada Lovelace, 36 years old.',),
    ("Écris une phrase sur le café à Genève, puis traduis-la en anglais.",),
    ("Write a short poem about the sea. 🌊",),
    ("Hi, I am Tom.", "Hello Tom, how can I help you?", "What is my name?"),
    ("Summarize in one sentence: " + "The old bridge over the river was closed in May. " * 12,),
)


def golden(llama: llama_cpp.Llama, contents: tuple[str, ...]) -> dict[str, Any]:
    """Messages, prompt ids, greedy ids and their margins of one conversation."""
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": content}
        for turn, content in enumerate(contents)
    ]
    template = Jinja2ChatFormatter(
        llama.metadata["tokenizer.chat_template"], eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    prompt = template(messages=messages).prompt
    prompt_ids = llama.tokenize(prompt.encode(), add_bos=False, special=True)
    ids, margins = [], []
    llama.reset()
    llama.eval(prompt_ids)
    for _ in range(NEW_TOKENS):
        logits = llama.scores[llama.n_tokens - 1]
        second, first = np.sort(np.partition(logits, -2)[-2:])
        ids.append(int(logits.argmax()))
        margins.append(round(float(first - second), 4))
        llama.eval(ids[-1:])
    return {"messages": messages, "prompt_ids": prompt_ids, "greedy_ids": ids, "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256 != SHA256:
        parser.error(f"{path}: sha256 {sha256} is not that of SmolLM2's file, {SHA256}")
    llama = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False)
    made_with = {
        "script": "tests/oracle/make_llama_goldens.py",
        "llama-cpp-python": importlib.metadata.version("llama-cpp-python"),
        "llama.cpp": llama_cpp.llama_print_system_info().decode(),
    }
    facts = {"made_with": made_with, "file": path.name, "sha256": sha256}
    prompts = ",\n".join(json.dumps(golden(llama, contents)) for contents in CONVERSATIONS)
    GOLDEN.write_text(f'{json.dumps(facts)[:-1]}, "prompts": [\n{prompts}\n]}}\n', encoding="utf-8")
    print(GOLDEN)


if __name__ == "__main__":
    main()
