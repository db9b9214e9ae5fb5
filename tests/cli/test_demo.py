"""The lines and tables of `ssd-jax demo`, and the flags that it refuses."""

import io

import pytest
from rich.console import Console

from ssd_jax.cli.demo import first_round
from ssd_jax.cli.main import main
from ssd_jax.errors import InputError
from ssd_jax.system.cores import usable_cores
from ssd_jax.tools.bench.report import summarize
from ssd_jax.tools.bench.run import run_paired
from ssd_jax.tools.demo.tables import fastest_line, speed_table
from ssd_jax.tools.traces.read import EngineLanes, Slice
from tests.tools.bench import fakes


def rows(**modes):
    """Summaries of modes by the results that each has of its prompts."""
    variants = {name: lambda prompt, of=of: of[prompt.index] for name, of in modes.items()}
    count = len(next(iter(modes.values())))
    return summarize(run_paired(variants, fakes.prompts(count), warmup=0, repeats=1))


def answers(**options):
    """Two that are alike."""
    return [fakes.result(**options)] * 2


def shown(width=80, **modes):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(speed_table(rows(**modes), title="all cores"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_only_columns_with_values():
    ar = answers(tokens_per_second=30)
    table = shown(ar=ar, sd=answers(tokens_per_second=45))
    assert "all cores" in table
    assert "1.50x" in table
    assert "hit" not in table
    assert "yes" in table
    assert "no" in shown(ar=ar, sd=answers(ids=(1, 3)))


def test_the_widest_table_fits_80_columns_with_nothing_folded():
    metrics = {"acceptance_length": 12.95, "hit_rate": 1.0, "hidden_draft_share": 0.62}
    widest = answers(tokens_per_second=1213.4, ttft=1.19, metrics=metrics)
    table = shown(ar=answers(tokens_per_second=10), ssd=widest)
    for part in ("1213.4", "121.34x", "1190", "12.95", "1.00", "0.62", "yes"):
        assert part in table
    assert all(word in table for word in ("tokens", "token", "a round", "same"))
    assert table.count("mode") == 1


def test_a_ratio_is_the_quotient_of_the_speeds_beside_it():
    def of(speeds, lengths=(None, None, None)):
        return [
            fakes.result(range(tokens), tokens_per_second=speed, metrics={"acceptance_length": a})
            for tokens, speed, a in zip((2, 3, 100), speeds, lengths, strict=True)
        ]

    table = shown(ar=of((10, 20, 90)), ssd=of((30, 30, 45), (1.25, 2.5, 4)))
    (ssd,) = (line.split() for line in table.splitlines() if line.startswith("ssd"))
    (ar,) = (line.split() for line in table.splitlines() if line.startswith("ar"))
    assert float(ssd[2].rstrip("x")) == pytest.approx(float(ssd[1]) / float(ar[1]), abs=0.01)
    assert ssd[2] != "1.50x"  # the median of 3, 1.5 and 0.5
    assert "2.50" in ssd
    assert "ratio: of tokens/s to those of ar" in table
    assert "ratio" not in shown(ar=answers())


def test_the_fastest_mode_is_named_with_its_settings_and_the_quotient_of_what_is_shown():
    of_sd = {"sd k=1": answers(tokens_per_second=126), "sd k=4": answers(tokens_per_second=90)}
    found = rows(ar=answers(tokens_per_second=100), **of_sd)
    assert fastest_line(found, "native") == (
        "measured here: sd, native, K = 1: 126.0 tokens/s, 1.26x of ar (100.0)"
    )


def test_where_nothing_is_faster_than_ar_the_next_mode_is_named():
    found = rows(ar=answers(tokens_per_second=100), **{"ssd k=4": answers(tokens_per_second=80)})
    assert fastest_line(found, "bfloat16") == (
        "measured here: ar, bfloat16: 100.0 tokens/s; the next is ssd, K = 4 with 0.80x of ar"
    )


def test_answers_of_one_token_have_no_speed():
    found = rows(ar=answers(ids=(1,)), sd=answers(ids=(1,)))
    assert "no answer has two tokens" in fastest_line(found, "native")


def test_the_rounds_that_are_drawn_are_those_of_the_answer_that_was_shown():
    target = [
        Slice("", n, n + 1, {"round": n, "rows": [{"request": request}]})
        for n, request in enumerate((0, 0, 1, 1, 2))
    ]
    engine = EngineLanes(name="ssd", target=target, drafts=[])
    assert (first_round(engine, 1), first_round(engine, 7)) == (2, None)


@pytest.mark.parametrize("name", ["k", "budget", "draft_dtype", "draft_cores"])
def test_settings_of_a_draft_need_one(name, tmp_path, capsys):
    value = "int8" if name == "draft_dtype" else "1"
    assert main(["demo", f"--{name}={value}"]) == 2
    message = f"{name} = '{value}' is for a draft of yours; give --draft, too"
    assert message in capsys.readouterr().err
    file = tmp_path / "settings.toml"
    file.write_text(f'{name} = "{value}"')
    assert main(["demo", f"--config={file}"]) == 2
    assert f"config {file}: {message}" in capsys.readouterr().err


def test_a_mode_is_taken_at_its_word(capsys, monkeypatch):
    assert main(["demo", "--mode=sd"]) == 2
    assert "mode = 'sd' needs a draft" in capsys.readouterr().err
    opened = []

    def open_llm(config, ks):
        opened.append(config.mode)
        raise InputError("no model is here")

    monkeypatch.setattr("ssd_jax.cli.demo.open_llm", open_llm)
    for flags in (["--mode=ar"], ["--draft=ngram"], ["--mode=auto", "--draft=ngram"]):
        assert main(["demo", *flags]) == 2
    assert opened == ["ar", "sd", "auto"]


def test_every_mode_has_the_target_on_the_given_cores(tiny_checkpoint, capsys, monkeypatch):
    core, opened = min(usable_cores()), []

    def open_llm(config, ks):
        opened.append((config.mode, config.target_cores, config.draft_placement))
        raise InputError("no weights are here")

    monkeypatch.setattr("ssd_jax.cli.demo.open_llm", open_llm)
    assert main(["demo", f"--target={tiny_checkpoint}", f"--target_cores={core}"]) == 2
    assert "no weights are here" in capsys.readouterr().err
    assert opened == [("ssd", str(core), "process")]
