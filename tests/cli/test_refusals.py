"""What no command can do is refused with exit status 2, before anything is opened."""

from __future__ import annotations

import shlex

import pytest

from ssd_jax.cli.main import main

REFUSALS = {
    "generate": """
--temperature=-1 | temperature = -1.0 is out of range
--top_p=0 | top_p = 0.0 is out of range
--k=abc | k = 'abc' is impossible; give auto or 1 to 16
--k=17 | k = 17 is impossible
--proposal_support=some | proposal_support = 'some' is impossible; give full or 1
--target= | target is empty
--top_k=-3 | top_k = -3
--max_tokens=0 | max_tokens = 0
--slots=0 | slots = 0 must be at least 1
--slots=many | many
--mode=fast | mode = 'fast' is unknown; one of
--dtype=fp8 | dtype = 'fp8' is unknown
--temprature=1 | temprature
stray | unexpected argument 'stray'
--prompt_file=x.jsonl | one of --prompt
--mode=ssd --draft=ngram | --draft=ngram is for --mode=sd
--mode=sd | mode = 'sd' needs a draft: --draft=ngram, --draft=default
--mode=ssd | mode = 'ssd' needs a draft model
--mode=ssd --draft=x --draft_devices=1 --draft_placement=inline | is for a draft elsewhere
--target_cores=0-1,x | is not understood; give core numbers and ranges
--target_cores=5000 | there is no core 5000
--mode=ssd --draft=x --backup=luck | backup = 'luck' is unknown
--mode=ssd --draft=x --predict=luck | predict = 'luck' is unknown
--mode=ssd --draft=x --budget=1 | budget = 1 is impossible; give auto or 2 to 256
--mode=ssd --draft=x --saguaro_c=1.5 | saguaro_c = 1.5 is out of range
--mode=ssd --draft=x --fan_out=1,2 | k = 0..4 needs 5
--mode=ssd --draft=x --k=2 --budget=8 --fan_out=3,3,3 | sums to 9, and budget = 8
--mode=ssd --draft=x --verify=coupled --saguaro_c=0.5 | saguaro_c = 0.5 is for verify = 'ratio' or
--mode=sd --draft=x --budget=8 | budget = 8 means nothing with mode = 'sd'
--mode=auto | mode = 'auto' finds out whether a draft pays; give one
--mode=ssd --draft=x --k=auto --fan_out=4,3,3,2,4 | lists branches for one k and budget, and k is
--draft=ngram | draft = 'ngram' means nothing with mode = 'ar'
--k=4 | k = 4 means nothing with mode = 'ar'
--mode=sd --draft=ngram --draft_dtype=int8 | draft_dtype = 'int8' means nothing with draft = 'ngram'
--mode=sd --draft=ngram --draft_temperature=1 | draft_temperature = 1.0 means nothing with draft =
--mode=sd --draft=x --draft_temperature=-1 | draft_temperature = -1.0 is out
--mode=sd --draft=x --draft_temperature=1e-9 | draft_temperature = 1e-09 is out
--mode=sd --draft=ngram --proposal_support=64 | proposal_support = 64 means
--mode=sd --draft=x --proposal_support=full --verify=coupled | is for verify = 'ratio' or 'block';
--repetition_penalty=0 | repetition_penalty = 0.0 is out of range
--logit_bias=5 | give id:bias
--exact=exactly | exact = 'exactly' is unknown; one of
--logprobs=21 | logprobs = 21 is out of range; give a value from 0 to 20
--logprobs=3 | logprobs = 3 are shown in JSON lines alone; add --json
--prompt_logprobs=0 | prompt_logprobs = 0 are shown in JSON lines alone; add --json
--logprobs_of=processed | logprobs_of = 'processed' means nothing without logprobs
--stop= | each stop is a string of Unicode text that is not empty
--bad_words= | each bad word is a string of Unicode text that is not empty
--config=missing.toml | missing.toml
--compare=ar | compare = 'ar' is the mode that runs anyway
--compare=sd | use --mode=sd --compare=ar
--mode=ar --draft=d --compare=ssd | use --mode=ssd --compare=ar
--compare=fast | compare = 'fast' is unknown; one of
--mode=sd --draft=ngram --compare=sd | is the mode that runs anyway
--mode=sd --draft=ngram --compare=ssd | use --mode=ssd --compare=sd
--mode=sd --draft=ngram --compare=auto | compare = 'auto' names no mode
""",
    "chat": """
--chat_template=false | leave out --chat_template=false
--history= | history is empty
--logprobs=2 | chat shows no log-probabilities; leave out --logprobs
stray | unexpected argument 'stray'
""",
    "bench": """
--repeats=0 | repeats = 0 is out of range; give 1 or more
--warmup=-1 | warmup = -1 is out of range; give 0 or more
--suite=step --step_repeats=0 | step_repeats = 0 is out of range; give 1
--suite=perplexity --window=1 | window = 1 is out of range; give 2 or more
--suite=perplexity --windows=0 | windows = 0 is out of range; give 1 or more
--suite=perplexity --text=none | none does not exist; give a text file in UTF-8
--suite=step --repeats=2 | repeats = 2 is for --suite=prompts, and this is
--window=64 | window = 64 is for --suite=perplexity
--suite=step --widths=2,3 | widths = '2,3': give different numbers from 1 to 17
--suite=step --widths=1,1 | widths = '1,1': give different numbers
--suite=step --widths=1,18 | widths = '1,18': give different numbers
--suite=step --widths=one | widths = 'one': give numbers from 1, such as
--widths=1,5 | widths = '1,5' is for --suite=step
--suite=step --ks=2 | ks = '2' is for --suite=prompts, and this is
--ks=2 | ks = '2': no mode of 'ar' proposes so many tokens
--ks=2,3 --mode=auto --draft=ngram | no mode of 'ar,auto' proposes
--ks=2,x | ks = '2,x': each is 1 to 16
--suite=support | suite = 'support' is unknown; one of prompts, step,
--prompts=mt_bench:0 | N must be at least 1
--slots=99999999999 | slots = 99999999999 is out of range
--max_tokens=0 | max_tokens = 0 is out of range
--modes=ar,auto | finds out whether a draft pays
--modes=ar,ssd | needs a draft model
--modes=ar,sd | needs a draft
--mode=sd --draft=ngram --ks=0,2 | each is 1 to 16
--modes=fast | each is one of
--suite=speed | suite = 'speed' is unknown
""",
    "convert": """
--out= | give --out=DIRECTORY
--out=/dev/null/x | out = '/dev/null/x' cannot be written: Not a directory
--out=/proc/x | out = '/proc/x' cannot be written
--out=/etc/passwd | /etc/passwd exists
--out=new --dtype=int8 | dtype = 'int8' cannot be stored; give one of
--out=new --dtype=native | dtype = 'native' cannot be stored; give one of
--out=new --seed=1 | seed means nothing for convert, which takes --target,
""",
    "demo": """
--mode=sd | mode = 'sd' needs a draft
--target_cores=999 | there is no core 999
--full --draft=ngram | full: the table of every mode
""",
    "draft-worker": """
--listen=127.0.0.1:0 --draft=does-not-exist --compile_cache= | compile_cache is empty; give a
""",
    "distill": """
--config=none.toml --draft=x --stage=train | draft = 'x' is for stage evaluate, and this is stage
""",
}
"""By command: flags, and what its line says."""
ROWS = {
    f"{command} {flags}": (command, shlex.split(flags), message)
    for command, rows in REFUSALS.items()
    for flags, message in (row.split(" | ") for row in rows.strip().splitlines())
}
OF_A_TARGET = "generate", "chat", "bench", "convert"


def refusal(command, flags, capsys):
    """What a command says that is refused."""
    target = ["--target=does-not-exist"] if command in OF_A_TARGET else []
    prompt = ["--prompt=x"] if command == "generate" else []
    assert main([command, *target, *prompt, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(("command", "flags", "message"), ROWS.values(), ids=ROWS)
def test_flags_that_a_command_cannot_honour_are_refused_by_name(command, flags, message, capsys):
    assert message in refusal(command, flags, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop=" + "x" * 5000], "stop has 1 strings of 5000 characters; give at most 64"),
        (["--stop=a"] * 65, "stop has 65 strings of 65 characters"),
        (["--bad_words=a"] * 129, "bad_words has 129 strings of 129 characters; give at most 128"),
    ],
    ids=["a long stop", "many stops", "many bad words"],
)
def test_stops_and_bad_words_have_limits(flags, message, capsys):
    assert message in refusal("generate", flags, capsys)
