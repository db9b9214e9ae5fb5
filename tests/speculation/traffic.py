"""Requests that come and go, and what a controller answers them."""

from tests.engine.letters import drain, outputs, request

WORDS = "now and again and then again "
# Where the right bonus token stands among the candidates.
PREDICTORS = {
    "right": lambda prompt, position: 0,
    "wrong": lambda prompt, position: None,
    "shuffled": lambda prompt, position: (sum(prompt) * 31 + position * position * 7) % 11,
}


def script(prompt, position):
    """Repeats itself, for the n-gram backup; every prompt has its own text, without an end."""
    return 33 + (sum(prompt) + ord(WORDS[position % len(WORDS)])) % 90


def letters(prompt, first, last):
    return "".join(chr(script(prompt, position)) for position in range(first, last))


REQUESTS = [
    request([65], max_tokens=9),
    request(range(40, 51), max_tokens=14),  # three chunks
    request([70, 71], max_tokens=99),  # up to the context
    request([72, 73, 74], max_tokens=2),
    request([65, 66], stop_token_ids=(script([65, 66], 19),)),
    request([81] * 5, stop=letters([81] * 5, 12, 15)),
    request([65], max_tokens=1),
    request([90, 91], max_tokens=20),
]


def results(engine, arrivals=REQUESTS):
    """Texts and reasons of requests that arrive two a step."""
    events, numbers = [], []
    for first in range(0, len(arrivals), 2):
        numbers += [engine.add(arrival) for arrival in arrivals[first : first + 2]]
        events += engine.step()
    done = outputs(events + drain(engine))
    return [(done[n].token_ids, done[n].text, done[n].finish_reason) for n in numbers]
