"""Makes `tests/goldens/<model>.json`: what transformers computes from a published GGUF file.

Run in the oracle environment (see the README beside this file) from the repository root:

    python tests/oracle/make_model_goldens.py FILE.gguf [FILE.gguf ...]

One user message through the file's own chat template, greedy continuation in float32 of the
dequantised weights. Ids beyond the first dozen hold only for float32 arithmetic on the same
dequantised weights; the first-token logits hold to about 0.001 between machines.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

FOLDER = Path(__file__).resolve().parents[1] / "goldens"
MESSAGES = [{"role": "user", "content": "Name three uses of a paperclip."}]
NEW_TOKENS = 32
NAMES = {  # golden file by the sha256 of the model file: other bytes are not this model
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53": "smollm2",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32": "qwen2.5-coder-0.5b",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046": "qwen2.5-coder-1.5b",
}


@torch.no_grad()
def golden(path: Path, sha256: str) -> dict[str, Any]:
    """Prompt ids, first-token logits and greedy ids of one file.

    Raises:
      RuntimeError: transformers kept the weights packed, so its arithmetic is not float32.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    if any(value.dtype != torch.float32 for value in model.parameters()):
        raise RuntimeError(f"{path}: the weights were not dequantised to float32")
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    ids = torch.tensor([prompt["input_ids"]])
    logits = model(ids, logits_to_keep=1).logits[0, -1]
    top = logits.topk(5)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
    )
    new = out[0, ids.shape[1] :].tolist()
    return {
        "made_with": {
            "script": "tests/oracle/make_model_goldens.py",
            "how": "transformers, float32 on the CPU, dequantised weights, greedy, chat template "
            "of the file; ids end with the EOS where one came; text keeps special tokens",
            "date": datetime.date.today().isoformat(),
            "gguf": importlib.metadata.version("gguf"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256,
        "messages": MESSAGES,
        "prompt_ids": ids[0].tolist(),
        "greedy_ids": new,
        "max_new_tokens": NEW_TOKENS,
        "top5": [
            [token, round(value, 4)]
            for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ],
        "logsumexp": round(logits.logsumexp(-1).item(), 4),
        "text": tokenizer.decode(new),
    }


def _dumps(value: dict[str, Any]) -> str:
    """One key a line, lists of ids not broken up."""
    lines = (f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write (%(default)s)")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for path in args.files:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 not in NAMES:
            parser.error(f"{path}: sha256 {sha256} is none of the pinned files")
        target = args.out / f"{NAMES[sha256]}.json"
        target.write_text(_dumps(golden(path, sha256)), encoding="utf-8")
        print(target)


if __name__ == "__main__":
    main()
