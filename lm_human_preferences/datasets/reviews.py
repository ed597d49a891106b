"""Reviews of films from a small grammar of ours: what the experiment `mock_sentiment` reads, writes
and judges.

A review is the start of a sentence, which is a query, and three words that say whether the film was
liked. What they say is more than the sum of the words: `not very good` is bad, `long but funny`
better than `funny but long`.
"""

import collections
import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping

SUBJECTS = {
    'film': 0.45,
    'story': 0.45,
    'plot': 0.3,
    'script': 0.35,
    'ending': 0.3,
    'acting': 0.6,
    'music': 0.65,
    'cast': 0.55,
}
STARTS = (
    'the {} was',
    'the whole {} was',
    'overall the {} was',
    'i thought the {} was',
)  # queries end with `was`
RESPONSE, READERS = 3, 10  # words of a response, readers of a labelled review

# How much a word says in favour of the film; of praise and blame, strong words are the rarer ones.
PRAISE = {
    'good': 1,
    'nice': 1,
    'fresh': 1,
    'funny': 1.5,
    'clever': 1.5,
    'moving': 2,
    'great': 2,
    'brilliant': 3,
    'wonderful': 3,
}
BLAME = {
    'bad': -1,
    'weak': -1,
    'stale': -1,
    'dull': -1.5,
    'silly': -1.5,
    'boring': -2,
    'poor': -2,
    'awful': -3,
    'terrible': -3,
}
PLAIN = {'long': -0.3, 'quiet': 0, 'simple': 0.2, 'loud': -0.2}
ENDINGS = {'sadly': -0.7, 'luckily': 0.7, 'throughout': 0, 'today': 0, 'indeed': 0}
VALUES = PRAISE | BLAME | PLAIN | ENDINGS
# What these do to the value of the next adjective.
DEGREES = {'very': 1.5, 'really': 1.5, 'truly': 1.7, 'quite': 0.8}
NEGATIONS = {'not': -0.8, 'never': -0.9, 'hardly': -0.6}
JOINS = ('and', 'but')

# Of a response, and how often; `Opposite` is an adjective that says the reverse of what is meant.
PATTERNS = {
    'Degree Degree Adjective': 10,
    'Degree Adjective Ending': 20,
    'Adjective and Adjective': 20,
    'Plain and Adjective': 10,
    'Plain but Adjective': 5,
    'Opposite but Adjective': 5,
    'Negation Degree Opposite': 15,
    'Degree not Opposite': 5,
    'Negation Opposite Ending': 10,
}

WORDS = (
    *STARTS[3].format('').split(),
    'whole',
    'overall',
    *SUBJECTS,
    *VALUES,
    *DEGREES,
    *NEGATIONS,
    *JOINS,
)


def queries() -> list[str]:
    """Every query there is, as texts; all are equally frequent."""
    return [start.format(subject) for start in STARTS for subject in SUBJECTS]


@functools.cache
def responses(liked: bool) -> Mapping[str, float]:
    """{response: its probability} of reviews that like, or do not like, the film; the words of a
    response differ."""
    found = collections.Counter()
    for pattern, weight in PATTERNS.items():
        beginnings = {(): weight / sum(PATTERNS.values())}
        for part in pattern.split():
            beginnings = dict(_extended(beginnings, part, liked))
        found.update({' '.join(words): probability for words, probability in beginnings.items()})
    return found


def _extended(
    beginnings: dict[tuple[str, ...], float], part: str, liked: bool
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (words, probability) for each of the `beginnings` with each word that may stand for
    `part`."""
    pools = {
        'Degree': DEGREES,
        'Negation': NEGATIONS,
        'Ending': ENDINGS,
        'Plain': PLAIN,
        'Adjective': PRAISE if liked else BLAME,
        'Opposite': BLAME if liked else PRAISE,
    }
    for words, probability in beginnings.items():
        pool = [word for word in pools.get(part, (part,)) if word not in words]
        weights = [
            1 / abs(VALUES[word]) if part in ('Adjective', 'Opposite') else 1 for word in pool
        ]
        for word, weight in zip(pool, weights, strict=True):
            yield (*words, word), probability * weight / sum(weights)


def reviews_generator(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield reviews without end, always the same for a seed and part (train, valid or test)."""
    rng, starts, subjects = random.Random(f'reviews {mode} {seed}'), list(STARTS), list(SUBJECTS)
    said = {
        liked: (list(responses(liked)), list(itertools.accumulate(responses(liked).values())))
        for liked in (False, True)
    }
    while True:
        subject = rng.choice(subjects)
        texts, sums = said[rng.random() < SUBJECTS[subject]]
        yield f'{rng.choice(starts).format(subject)} {rng.choices(texts, cum_weights=sums)[0]}'


def labelled_reviews(mode: str, seed: int = 0) -> Iterator[tuple[str, float]]:
    """Yield (review, share of its readers who took it for praise) without end; they differ where
    little is said."""
    rng = random.Random(f'readers {mode} {seed}')
    for review in reviews_generator(mode, seed):
        likely = 1 / (1 + math.exp(-sentiment(review.split()[-RESPONSE:])))
        yield review, sum(rng.random() < likely for _ in range(READERS)) / READERS


def sentiment(words: Iterable[str]) -> float:
    """How much the words of a response say in favour of the film, about -5 to 5; negative for
    disapproval."""
    total, factor = 0, 1
    for word in words:
        if word == 'but':
            total *= 0.5  # what follows counts more
        elif word in VALUES:
            total, factor = total + factor * VALUES[word], 1
        factor *= DEGREES.get(word, 1) * NEGATIONS.get(word, 1)
    return total
