"""Stage prompts: files become token ids, split by file, without leaks; bad input is named."""

import gzip
import json
import re

import pytest

from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.errors import InputError
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.magpie import GeneratedTurn
from ssd_jax.tools.distill.prompt_ids import read_prompts, write_prompts
from ssd_jax.tools.distill.prompts import PromptFiles, describe_counts
from ssd_jax.tools.distill.reading import passages
from tests.tools.distill import tiny_run
from tests.tools.distill.tiny_run import write_lines


@pytest.fixture
def tokenizer(tmp_path):
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    tiny.write_tokenizer(directory)
    return tokenizer_from_directory(directory)


@pytest.fixture
def prepare(tmp_path, tokenizer):
    """Prepares prompts with some keys of the section changed."""
    tiny_run.write_data(tmp_path)

    def run(written=(), **changes):
        given = tiny_run.settings(tmp_path, **{f"prompts_{k}": v for k, v in changes.items()})
        return PromptFiles(given.prompts, given.directory).prepare(tokenizer, written)

    return run


def texts(prompts, tokenizer):
    return [tokenizer.decode(prompt.ids, skip_special_tokens=False) for prompt in prompts]


def test_prompts_go_through_the_chat_template_and_text_is_cut(prepare, tokenizer, tmp_path):
    prompts, counts = prepare()
    train = texts(prompts["train"], tokenizer)
    assert train[0] == "<eot>user:0red0owl0?<eot>assistant:"
    plain = [prompt for prompt in prompts["train"] if prompt.plain]
    text = "".join(texts(plain, tokenizer))
    assert (tmp_path / "text.txt").read_text().startswith(text)
    assert {len(prompt.ids) for prompt in plain} == {24}
    assert [prompt.index for prompt in plain] == list(range(len(plain)))
    assert texts(prompts["held_out"], tokenizer)[0] == "<eot>user:Why is it so?<eot>assistant:"
    assert counts["train"]["train.jsonl"] == {"kept": 7, "too_long": 0}


def test_a_rest_of_less_than_half_a_passage_is_dropped():
    assert passages(range(10), 4, prefix=[]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert passages(range(9), 4, prefix=[]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert passages(range(5), 4, prefix=[77]) == [[77, 0, 1, 2], [77, 3, 4]]


def test_a_planted_leak_is_dropped_from_training_and_counted(prepare, tokenizer, tmp_path):
    write_lines(
        tmp_path / "train.jsonl",
        {"question": "I ask: Why is it so? Tell!"},  # the whole of a text of 13 tokens
        {"question": "Well, ho came there? Oh"},  # 13 of the other's 15
        {"question": "Well, o came there? Oh"},  # 13, too
        {"question": "Well, came there? Oh"},  # 11
    )
    prompts, counts = prepare(train='["train.jsonl"]')
    found = texts(prompts["train"], tokenizer)
    assert found == ["<eot>user:Well, came there? Oh<eot>assistant:"]
    assert counts["train"]["train.jsonl"]["leaking"] == 3
    assert len(prompts["held_out"]) == 2
    assert "1 prompts (train.jsonl 1); 3 that share a span" in describe_counts(counts)


def test_a_blank_held_out_prompt_gives_nothing_away(prepare, tmp_path):
    for blank in ("", " ", "\n"):
        write_lines(tmp_path / "train.jsonl", {"question": f"Two words{blank} "})
        write_lines(tmp_path / "held_out.jsonl", {"question": blank})
        _, counts = prepare(train='["train.jsonl"]')
        assert counts["train"]["train.jsonl"] == {"kept": 1, "too_long": 0}


def test_every_turn_of_a_held_out_conversation_is_kept_apart(prepare, tmp_path):
    turns = ["Tell me a joke!", "Is it a new one?", "Who wrote it down?"]
    write_lines(tmp_path / "held_out.jsonl", {"question_id": 1, "turns": turns})
    write_lines(
        tmp_path / "train.jsonl", *({"prompt": f"I say: {turn} Oh"} for turn in (*turns, "Well!"))
    )
    prompts, counts = prepare(train='["train.jsonl"]')
    assert counts["train"]["train.jsonl"] == {"kept": 1, "too_long": 0, "leaking": 3}
    assert len(prompts["held_out"]) == 1


def test_of_a_training_conversation_only_what_is_asked_is_compared(prepare, tmp_path):
    write_lines(tmp_path / "train.jsonl", {"turns": ["Tell me a joke!", "Why is it so?"]})
    _, counts = prepare(train='["train.jsonl"]')
    assert counts["train"]["train.jsonl"] == {"kept": 1, "too_long": 0}


def test_a_later_turn_that_is_no_text_is_named(prepare, tmp_path):
    write_lines(tmp_path / "held_out.jsonl", {"turns": ["Tell me a joke!", 3]})
    with pytest.raises(InputError, match=r"held_out.jsonl:1: turns\[1\] must be a string"):
        prepare()


def test_what_the_program_puts_around_every_prompt_is_no_leak(prepare, tmp_path):
    system = {"role": "system", "content": "You are a helpful assistant of the usual kind."}
    for name, word in (("train", "alpha"), ("held_out", "omega")):
        write_lines(
            tmp_path / f"{name}.jsonl",
            {"messages": [system, {"role": "user", "content": word}]},
            {"task_id": "HumanEval/0", "prompt": f"def {word}():"},
        )
    _, counts = prepare(train='["train.jsonl"]', longest="400")
    assert counts["train"]["train.jsonl"] == {"kept": 2, "too_long": 0}


def test_ids_choose_lines(prepare, tokenizer, tmp_path):
    names = ["task/1", "task/2", "task/3", "task/10", "task/11"]
    write_lines(tmp_path / "x.jsonl", *({"task_id": n, "text": f"do {n}"} for n in names))
    entry = '{{path = "x.jsonl", ids = "{}"}}'.format
    prompts, _ = prepare(train=f"[{entry('1-2,10')}]", held_out=f"[{entry('3,11-20')}]")
    assert [text[10:].split("<")[0] for text in texts(prompts["train"], tokenizer)] == [
        "do task/1",
        "do task/2",
        "do task/10",
    ]
    assert len(prompts["held_out"]) == 2


def test_a_gzipped_file_is_read(prepare, tmp_path):
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(json.dumps({"prompt": "zip"}).encode()))
    prompts, _ = prepare(train='["z.jsonl.gz"]')
    assert len(prompts["train"]) == 1


def test_long_prompts_are_left_out_and_counted(prepare, tmp_path):
    write_lines(tmp_path / "train.jsonl", {"prompt": "short"}, {"prompt": "long" * 20})
    prompts, counts = prepare(train='["train.jsonl"]')
    assert len(prompts["train"]) == 1
    assert counts["train"]["train.jsonl"] == {"kept": 1, "too_long": 1}
    assert "1 that are too long left out" in describe_counts(counts)


def test_a_limit_takes_prompts_from_all_over_a_file(prepare, tokenizer):
    prompts, counts = prepare(train='[{path = "train.jsonl", limit = 3}]')
    assert [prompt.index for prompt in prompts["train"]] == [0, 2, 4]
    assert counts["train"] == {"train.jsonl": {"kept": 3, "too_long": 0}}
    prompts, _ = prepare(train='[{path = "train.jsonl", limit = 30}]')
    assert len(prompts["train"]) == 7
    prompts, _ = prepare(train='[{path = "text.txt", limit = 2}]')
    assert [prompt.plain for prompt in prompts["train"]] == [True, True]


def test_prompts_can_be_there_several_times(prepare):
    prompts, _ = prepare(train='[{path = "train.jsonl", limit = 2, times = 3}, "text.txt"]')
    assert [prompt.index for prompt in prompts["train"][:6]] == [0, 0, 0, 3, 3, 3]


def _sentences(count):
    return " ".join(f"{i}: " + f"the {i}th word " * 9 + "ends." for i in range(count))


def test_tasks_over_a_text_stand_beside_its_passages(prepare, tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(_sentences(8))
    both = '[{path = "text.txt", limit = 2}, {path = "text.txt", tasks = 7}]'
    prompts, counts = prepare(train=both, longest="2000")
    assert counts["train"] == {
        "text.txt": {"kept": 2, "too_long": 0},
        "text.txt:tasks": {"kept": 7, "too_long": 0},
    }
    tasks = prompts["train"][2:]
    assert {task.set for task in tasks} == {"text.txt:tasks"}
    assert len({task.kind for task in tasks}) > 1
    assert not any(task.plain for task in tasks)
    for text in texts(tasks, tokenizer):
        assert text.startswith("<eot>user:")
        assert text.endswith("<eot>assistant:")
        assert "th word " in text


@pytest.mark.parametrize("written", ["part @-@ time", "part-time"])
def test_a_task_over_a_held_out_passage_leaks_in_either_spelling(prepare, tmp_path, written):
    (tmp_path / "text.txt").write_text("He had a part @-@ time job. " + _sentences(1))
    write_lines(tmp_path / "held_out.jsonl", {"prompt": written})
    with pytest.raises(InputError, match="1 that share a span with held-out ones left out"):
        prepare(train='[{path = "text.txt", tasks = 1}]', longest="2000")


@pytest.mark.parametrize("written", ["a part @-@ time job", "a part-time job."])
def test_what_a_held_out_task_is_about_leaks_in_either_spelling(prepare, tmp_path, written):
    (tmp_path / "held.txt").write_text("He had a part @-@ time job. " + _sentences(1))
    write_lines(tmp_path / "train.jsonl", {"question": written}, {"question": "What is a newt?"})
    _, counts = prepare(
        train='["train.jsonl"]', held_out='[{path = "held.txt", tasks = 1}]', longest="2000"
    )
    assert counts["train"]["train.jsonl"] == {"kept": 1, "too_long": 0, "leaking": 1}


def test_sources_of_prompts_have_digests(tmp_path):
    tiny_run.write_data(tmp_path)
    for train, made_from in (
        ('["text.txt"]', ["held_out.jsonl", "text.txt"]),
        ('[{path = "text.txt", tasks = 1}]', ["held_out.jsonl", "tasks.toml", "text.txt"]),
    ):
        given = tiny_run.settings(tmp_path, prompts_train=train)
        assert sorted(PromptFiles(given.prompts, given.directory).digests()) == made_from


def test_turns_that_the_target_wrote_are_prompts_beside_those_of_files(prepare, tokenizer):
    turns = [
        GeneratedTurn("What is a newt?", ""),
        GeneratedTurn("Tell me: Why is it so?", ""),  # held out
        GeneratedTurn("Who came there?" * 9, "broken"),
        GeneratedTurn("What is a newt", "repeated"),
        GeneratedTurn("newt " * 20, ""),
    ]
    prompts, counts = prepare(written=turns)
    assert texts(prompts["train"][-1:], tokenizer) == ["<eot>user:What is a newt?<eot>assistant:"]
    assert prompts["train"][-1].set == "magpie"
    counted = counts["train"]["magpie"]
    assert counted == {"kept": 1, "leaking": 1, "broken": 1, "repeated": 1, "too_long": 1}
    description = describe_counts(counts)
    for text in ("magpie 1", "1 that repeat others", "1 that were cut off or are no text"):
        assert text in description
    assert "magpie" not in counts["held_out"]


def test_kinds_of_prompts_are_kept(prepare, tmp_path):
    write_lines(
        tmp_path / "held_out.jsonl",
        *({"prompt": "a", "category": "b"}, {"prompt": "c", "category": None}),
    )
    prompts, _ = prepare()
    assert [prompt.kind for prompt in prompts["held_out"]] == ["b", ""]
    digests = write_prompts(tmp_path, prompts)
    assert read_prompts(tmp_path, "held_out", digests["held_out"]) == prompts["held_out"]


def test_every_bad_line_is_named_with_its_file(prepare, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "good"}\n{\n\n{"text": "?"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"prompt": 3}\n')
    with pytest.raises(InputError) as error:
        prepare()
    listed = [line.strip().partition(": ")[0] for line in str(error.value).splitlines()[1:]]
    assert listed == [
        f"{tmp_path / 'held_out.jsonl'}:1",
        f"{tmp_path / 'train.jsonl'}:2",
        f"{tmp_path / 'train.jsonl'}:4",
    ]


def test_text_that_is_not_utf8_is_named_with_its_line(prepare, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"one\ntwo\nth\xffree\n")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'text.txt'}:3: not UTF-8")):
        prepare()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": '["none.jsonl"]'}, "prompts 'none.jsonl': "),
        ({"train": '["target"]'}, "prompts target: a file cannot have that name"),
        ({"train": '["held_out.jsonl"]'}, "give each file to one of them"),
        ({"train": '["empty.jsonl"]'}, "no prompt of train is left: 0 prompts (empty.jsonl 0)"),
        ({"held_out": '["empty.jsonl"]'}, "no prompt of held_out is left"),
        ({"train": '[{path = "held_out.jsonl", ids = "1"}]'}, "give each file to one of them"),
        ({"train": '[{path = "text.txt", ids = "1"}]'}, "lines of plain text have no ids"),
        ({"train": '[{path = "train.jsonl", tasks = 1}]'}, "tasks are made over plain text"),
        ({"train": '[{path = "gsm8k", tasks = 1}]'}, "gsm8k is no file"),
        ({"train": '[{path = "text.txt", tasks = 9}]'}, "tasks = 9 is more than the 7 that 1"),
        ({"train": '[{path = "nameless.jsonl", ids = "1"}]'}, "1 lines have no number under"),
        (
            {"train": '[{path = "train.jsonl", ids = "0-1, 7-9,2,50"}]'},
            "prompts train.jsonl[0-1, 7-9,2,50]: no line has one of the ids 7-9,50, "
            "there are 0 to 6; mend ids",
        ),
        ({"train": '[{path = "empty.jsonl", ids = "1"}]'}, "ids 1, the file has no lines"),
    ],
)
def test_unusable_prompt_files_are_refused(prepare, tmp_path, changes, message):
    write_lines(tmp_path / "empty.jsonl")
    write_lines(tmp_path / "nameless.jsonl", {"prompt": "x"})
    with pytest.raises(InputError, match=re.escape(message)):
        prepare(**changes)


def test_a_built_in_set_can_be_held_out(prepare):
    prompts, _ = prepare(held_out='["mt_bench"]', longest="2000")
    assert {prompt.set for prompt in prompts["held_out"]} == {"mt_bench"}


def test_prompts_come_back_as_they_were_written(prepare, tmp_path):
    prompts, _ = prepare()
    digests = write_prompts(tmp_path, prompts)
    for split, digest in digests.items():
        assert read_prompts(tmp_path, split, digest) == prompts[split]
    path = tmp_path / "train.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="its sha256 differs"):
        read_prompts(tmp_path, "train", digests["train"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": '["./train.jsonl"]'}, "are to train and ./train.jsonl to be held out"),
        (
            {"train": '["train.jsonl", "./train.jsonl"]'},
            "train lists one file as 'train.jsonl' and as './train.jsonl'",
        ),
    ],
)
def test_a_file_by_another_spelling_is_the_same(prepare, changes, message):
    with pytest.raises(InputError, match=message):
        prepare(**changes)


def test_a_prompt_that_the_chat_template_refuses_is_named(
    prepare, tmp_path, monkeypatch, tokenizer
):
    def refuse(messages, **_about):
        if "two" in messages[0]["content"]:
            raise InputError("the chat template failed: no two")
        return [1]

    monkeypatch.setattr(tokenizer, "apply_chat_template", refuse)
    write_lines(tmp_path / "train.jsonl", {"question": "one"}, {"question": "two"})
    with pytest.raises(InputError, match=r"prompts train\.jsonl: prompt 2: the chat templ"):
        prepare()
