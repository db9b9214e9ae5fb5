"""`ssd-jax compare` and `generate --compare`: reports, verdicts and exit statuses."""

import json
from types import SimpleNamespace

import pytest

from ssd_jax.cli import generate
from ssd_jax.cli.main import main
from ssd_jax.engine.request import CompletionOutput, RequestOutput
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.compare.scores import Candidate, Scores

MODEL = ("--dtype=float32", "--context=300", "--compile_cache=off", "--exact=distribution")
COMMON = (*MODEL, "--max_tokens=12", "--ignore_eos")
PROMPTS = ["hello", "to be or not to be, that is to be", "xyxyxyxyxy"]


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return path


@pytest.fixture(scope="module")
def answers():
    """The lines of a run, such as `generate --json` writes."""
    return [
        {
            "prompt_index": index,
            "token_ids": [(5 * index + 7 * place) % 256 for place in range(12)],
            "text": "x",
            "finish_reason": "length",
            "metrics": {},
        }
        for index in range(len(PROMPTS))
    ]


def generated(tiny_checkpoint, prompt_file, capsys):
    """The lines of a real run."""
    flags = (f"--target={tiny_checkpoint}", f"--prompt_file={prompt_file}", "--json")
    assert main(["generate", *flags, *COMMON]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def write(tmp_path, answers, changes=()):
    """Writes two runs: one, and the same with some lines changed (None leaves one out)."""
    other = [
        line | changed
        for line, changed in (
            (line, dict(changes).get(line["prompt_index"], {})) for line in answers
        )
        if changed is not None
    ]
    paths = []
    for name, lines in (("a.jsonl", answers), ("b.jsonl", other)):
        paths.append(tmp_path / name)
        paths[-1].write_text("\n".join(json.dumps(line) for line in lines))
    return [str(path) for path in paths]


@pytest.fixture
def files(answers, tmp_path):
    return lambda changes=(): write(tmp_path, answers, changes)


def forged(line, place):
    ids = list(line["token_ids"])
    ids[place] = (ids[place] + 1) % 256
    return {"token_ids": ids}


def test_identical_runs_are_reported_as_identical(files, capsys):
    assert main(["compare", *files()]) == 0
    assert "3 of 3 prompts identical (100%)" in capsys.readouterr().out


def test_a_terminal_of_no_width_gets_the_report_too(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    test_identical_runs_are_reported_as_identical(files, capsys)


def test_without_a_model_a_fork_is_unknown(files, answers, capsys):
    assert main(["compare", *files({1: forged(answers[1], 4)})]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 3 prompts identical (67%)"
    assert ["1", "4", "33", "34", "unknown"] in map(str.split, lines)


def test_sampled_runs_may_differ_by_law(files, answers, capsys):
    assert main(["compare", *files({1: forged(answers[1], 4)}), "--temperature=1"]) == 0
    assert "different draws of the same distribution" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_with_the_model_a_forged_token_is_by_law(tmp_path, prompt_file, tiny_checkpoint, capsys):
    answers = generated(tiny_checkpoint, prompt_file, capsys)
    paths = write(tmp_path, answers, {2: forged(answers[2], 7)})
    settings = (f"--target={tiny_checkpoint}", f"--prompt_file={prompt_file}", *COMMON)
    # The flags of either run may be given as they were; the draft is not looked for.
    status = main(["compare", *settings, "--mode=sd", "--draft=no/such", "--k=3", *paths])
    assert status == 1
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith(" wrong"))
    assert row.split()[:3] == ["2", "7", f"{answers[2]['token_ids'][7]}"]
    assert float(row.split()[-2]) > 1e-3


@pytest.mark.parametrize(
    ("score", "verdict", "mode"),
    [
        (2.0, "wrong", ["--mode=sd", "--k=3", "--slots=4", "--mesh=data=2"]),
        (0.0005, "float", ["--mode=ssd", "--budget=8", "--draft_placement=process"]),
    ],
)
def test_with_a_model_the_verdict_is_of_its_scores(
    files, answers, prompt_file, tiny_checkpoint, capsys, monkeypatch, score, verdict, mode
):
    """With scores that are given in place of a loaded model's."""
    asked = []

    class Scorer:
        def __init__(self, llm, limit):
            pass

        def scores(self, request, common, a, b):
            asked.append((request.index, len(common), a, b))
            chosen, other = (Candidate(score=x, may_stay=True, may_go=False) for x in (score, 0.0))
            return Scores(a=chosen, b=other, best=score)

    monkeypatch.setattr("ssd_jax.cli.compare.load", lambda llm: None)
    monkeypatch.setattr("ssd_jax.tools.compare.scores.ForkScorer", Scorer)
    paths = files({2: forged(answers[2], 7)})
    settings = (f"--target={tiny_checkpoint}", f"--prompt_file={prompt_file}", *COMMON)
    # The flags of either run may be given as they were; the draft is not looked for.
    status = main(["compare", *settings, *mode, "--draft=no/such", *paths])
    one, other = answers[2]["token_ids"][7], forged(answers[2], 7)["token_ids"][7]
    assert asked == [(2, 7, one, other)]
    lines = capsys.readouterr().out.splitlines()
    row = ["2", "7", f"{one}", r'"\\"', f"{other}", '"]"', f"{score:.2g}"]
    assert [*row, verdict] in map(str.split, lines)
    assert status == int(verdict == "wrong")


@pytest.mark.slow
def test_generate_compares_two_modes(tiny_checkpoint, prompt_file, capsys):
    answers = generated(tiny_checkpoint, prompt_file, capsys)
    status = main(
        [
            "generate",
            f"--target={tiny_checkpoint}",
            f"--prompt_file={prompt_file}",
            *COMMON,
            *("--mode=sd", "--draft=ngram", "--k=3", "--compare=ar", "--json"),
        ]
    )
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["token_ids"] for line in lines] == [line["token_ids"] for line in answers]
    assert lines[0]["metrics"]["acceptance_length"] is not None
    assert "3 of 3 prompts identical (100%)" in err


@pytest.mark.slow
def test_generate_says_so_when_modes_part(tiny_checkpoint, monkeypatch, capsys):
    """The first token of the first run is not what the target said."""
    from ssd_jax.engine.requests.sequence import Sequence

    commit, calls = Sequence.commit, []

    def spoilt(self, tokens):
        calls.append(tokens)
        return commit(self, tokens if len(calls) > 1 else [(int(tokens[0]) + 1) % 256])

    monkeypatch.setattr(Sequence, "commit", spoilt)
    flags = (f"--target={tiny_checkpoint}", *COMMON, "--mode=sd", "--draft=ngram", "--k=3")
    status = main(["generate", "--prompt=x", *flags, "--compare=ar"])
    err = capsys.readouterr().err
    assert status == 1
    assert "0 of 1 prompts identical (0%)" in err
    assert "first difference: token 0 at the earliest" in err
    assert "wrong: not explained by rounding" in " ".join(err.split())


@pytest.mark.parametrize(
    ("temperature", "verdict", "status"), [(0.0, "unknown", 1), (1.0, "sampled", 0)]
)
def test_modes_over_hosts_are_compared_without_the_model(temperature, verdict, status, capsys):
    """Its programs run in engines alone there, on all hosts."""
    params = SamplingParams(temperature=temperature, seed=0)
    ended = {"index": 0, "prompt_index": 0, "seed": 0, "text": "", "finish_reason": "length"}

    def output(*ids):
        text = CompletionOutput(**ended, token_ids=[*ids], metrics={})
        return RequestOutput(request_id=0, prompt="x", prompt_token_ids=[1], outputs=[text])

    llm = SimpleNamespace(
        config=SimpleNamespace(hosts="auto", verify="ratio"),
        mode="sd",
        run=lambda requests, mode: [SimpleNamespace(output=output(5, 7))],
    )
    requests = [SimpleNamespace(index=0, params=params)]
    assert generate._compare(llm, requests, [output(5, 6)], "ar") == status
    lines = capsys.readouterr().err.splitlines()
    assert ["0", "1", "6", "7", verdict] in map(str.split, lines)


def test_prompts_of_one_run_only_are_reported(files, capsys):
    assert main(["compare", *files({1: None})]) == 2
    out = capsys.readouterr().out
    assert "2 of 2 prompts identical" in out
    assert "1 prompt has an answer in one run only" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "A.jsonl is missing; usage: ssd-jax compare A.jsonl B.jsonl"),
        (["{a}"], "B.jsonl is missing"),
        (["{a}", "{b}", "{a}"], "unexpected argument"),
        (["{a}", "no-such.jsonl"], "no-such.jsonl"),
        (["{a}", "{prompts}"], 'prompts.jsonl:1: "prompt_index" must be'),
        (["{a}", "{b}", "--temperature=-1"], "temperature = -1.0 is out of range"),
        (["{a}", "{b}", "--prompt_file={one}"], "one.jsonl has 1 prompts"),
        (["{a}", "{b}", "--prompt_file={bad}"], "bad.jsonl:1: must be a JSON object"),
        (["{a}", "{b}", "--prompt_file={prompts}", "--context=30"], "the prompt has"),
    ],
)
def test_bad_files_of_compare_are_named(
    files, answers, prompt_file, tiny_checkpoint, arguments, message, capsys
):
    a, b = files({0: forged(answers[0], 2)})
    one, bad = (prompt_file.with_name(name) for name in ("one.jsonl", "bad.jsonl"))
    one.write_text('{"prompt": "x"}')
    bad.write_text("[1]\n[2]\n[3]\n")
    named = {"a": a, "b": b, "prompts": prompt_file, "one": one, "bad": bad}
    given = [argument.format(**named) for argument in arguments]
    assert main(["compare", f"--target={tiny_checkpoint}", *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"token_ids": [999]}, (), "token id 999 is not in the vocabulary"),
        ({}, ("--context=50",), "raise --context"),
    ],
)
def test_answers_of_another_model_are_refused(
    files, answers, prompt_file, tiny_checkpoint, change, flags, message, capsys
):
    paths = files({1: change or forged(answers[1], 11)})
    settings = (f"--target={tiny_checkpoint}", f"--prompt_file={prompt_file}", "--dtype=float32")
    assert main(["compare", *paths, *settings, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_usage_names_the_files(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "usage: ssd-jax compare A.jsonl B.jsonl" in capsys.readouterr().out
