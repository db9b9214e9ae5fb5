"""Tasks over plain text: passages of whole sentences, wordings of several kinds, no chance."""

import re
import tomllib
from collections import Counter

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.tasks import TEMPLATES, cut, make_tasks, usual_spelling

WORDINGS = tomllib.loads(TEMPLATES.read_text(encoding="utf-8"))


def sentence(number: int, words: int = 12) -> str:
    return " ".join([f"S{number}", *("word" for _ in range(words - 2)), "end."])


def paragraphs(count: int, sentences: int = 3) -> str:
    """Of 36 words each by default."""
    numbers = iter(range(count * sentences))
    return "\n\n".join(
        " ".join(sentence(next(numbers)) for _ in range(sentences)) for _ in range(count)
    )


@pytest.mark.parametrize("kind", WORDINGS)
def test_a_kind_has_several_wordings_which_all_hold_the_passage(kind):
    assert len(set(WORDINGS[kind])) >= 6
    for wording in WORDINGS[kind]:
        assert wording.count("{passage}") == 1
        assert {*re.findall(r"{(\w*)}", wording)} <= {"passage", "name"}
    assert any("{name}" not in wording for wording in WORDINGS[kind])


def test_passages_end_with_sentences_and_with_paragraphs_where_they_can():
    text = paragraphs(9) + "\n\n" + paragraphs(1, sentences=40)
    passages = cut(text)
    assert all(passage in text for passage in passages)
    assert all(passage.endswith("end.") for passage in passages)
    written = text.split("\n\n")
    for passage in passages[:4]:  # of short paragraphs
        assert set(passage.split("\n\n")) <= set(written)
    lengths = [len(passage.split()) for passage in passages]
    assert min(lengths) >= 25
    assert max(lengths) < 100 + 40 + 12
    assert len(set(lengths)) > 2


def test_a_passage_does_not_run_over_a_heading():
    text = f"{paragraphs(1)}\n\n= Heading =\n\n{paragraphs(1)}"
    assert cut(text) == [paragraphs(1), paragraphs(1)]
    assert cut(f"{sentence(1)}\n\n= Heading =\n\n{sentence(2)}") == []  # too short each


def test_a_sentence_with_an_unknown_word_is_left_out():
    text = f"{sentence(1, 20)} The <unk> came. {sentence(2, 20)}"
    assert cut(text) == [f"{sentence(1, 20)} {sentence(2, 20)}"]


@pytest.mark.parametrize(
    ("written", "usual"),
    [
        (
            "a part @-@ time job , 1 @,@ 200 @.@ 5 m ( 4 ft ) .",
            "a part-time job, 1,200.5 m (4 ft).",
        ),
        (" it 's \" so \" , he didn 't say ; no", "it's \"so\", he didn't say; no"),
        ("SPEAKER:\nThou know'st, my lord:--\nwell!", "SPEAKER:\nThou know'st, my lord:--\nwell!"),
    ],
)
def test_the_spelling_of_wikitext_becomes_the_usual_one(written, usual):
    assert usual_spelling(written) == usual


def test_a_passage_gets_each_kind_once():
    text = paragraphs(8)
    count = len(WORDINGS) * len(cut(text))
    tasks = make_tasks(text, count, "a")
    assert len({task.prompt for task in tasks}) == count
    pairs = Counter((task.kind, task.passage) for task in tasks)
    assert set(pairs.values()) == {1}
    for task in tasks:
        assert usual_spelling(task.passage) in task.prompt
    with pytest.raises(InputError, match=f"prompts 'a': tasks = {count + 1} is more than the"):
        make_tasks(text, count + 1, "a")


def test_kinds_are_mixed_from_the_first_task_on():
    tasks = make_tasks(paragraphs(60), 14, "a")
    assert set(Counter(task.kind for task in tasks).values()) == {2}
    assert len({task.passage for task in tasks}) == 14


def test_tasks_depend_on_the_text_and_its_name_alone():
    text = paragraphs(30)
    tasks = make_tasks(text, 20, "a")
    assert make_tasks(text, 20, "a") == tasks == make_tasks(text, 30, "a")[:20]
    assert make_tasks(text, 20, "b") != tasks
    # Golden: other tasks of the same settings would mix two kinds of data in one directory.
    assert [(task.kind, task.prompt[:24]) for task in tasks[:3]] == [
        ("summarise", "Suggest a title for this"),
        ("translate", "Translate into French:\n\n"),
        ("answer", "Text:\nS33 word word word"),
    ]


@pytest.mark.parametrize(
    ("begin", "name"),
    [("FIRST LORD:\nWell", "FIRST LORD"), ("In the year, Ada Jane Byron went", "Ada Jane Byron")],
)
def test_a_name_of_the_passage_is_asked_for(begin, name):
    tasks = make_tasks("\n\n".join(f"{begin} {sentence(i, 30)}" for i in range(20)), 50, "a")
    around = [task.prompt.replace(usual_spelling(task.passage), "") for task in tasks]
    assert 0 < sum(name in text for text in around) < 50
    assert not any("{name}" in task.prompt for task in tasks)


def test_without_a_name_none_is_asked_for():
    tasks = make_tasks("\n\n".join(sentence(i, 30) for i in range(20)), 50, "a")
    assert not any("You are ." in task.prompt or "{name}" in task.prompt for task in tasks)
