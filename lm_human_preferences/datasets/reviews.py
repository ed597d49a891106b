"""Film reviews from a small grammar, for the experiment `mock_sentiment`.

A review is the start of a sentence, which is the query, and three words that say whether the film
was liked. They mean more than the sum of the words: `not very good` is bad, `long but funny` is
better than `funny but long`.
"""

import collections
import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping

# {subject of a review: probability that the review is positive}
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
# A query is one of these starts of a sentence, with {} replaced by a subject from SUBJECTS.
STARTS = (
    'the {} was',
    'the whole {} was',
    'overall the {} was',
    'i thought the {} was',
)
RESPONSE = 3  # number of words in a response
READERS = 10  # number of simulated readers of each labelled review


# A word's value is positive for praise. Strong words are rarer, in praise and in blame.
PRAISE = dict(good=1, nice=1, fresh=1, funny=1.5, clever=1.5)
PRAISE |= dict(moving=2, great=2, brilliant=3, wonderful=3)
BLAME = dict(bad=-1, weak=-1, stale=-1, dull=-1.5, silly=-1.5)
BLAME |= dict(boring=-2, poor=-2, awful=-3, terrible=-3)
NEUTRAL = {'long': -0.3, 'quiet': 0, 'simple': 0.2, 'loud': -0.2}
ENDINGS = {'sadly': -0.7, 'luckily': 0.7, 'throughout': 0, 'today': 0, 'indeed': 0}
VALUES = PRAISE | BLAME | NEUTRAL | ENDINGS
# A degree (`very`) or a negation (`not`) multiplies the next adjective's value by a factor.
DEGREES = {'very': 1.5, 'really': 1.5, 'truly': 1.7, 'quite': 0.8}
NEGATIONS = {'not': -0.8, 'never': -0.9, 'hardly': -0.6}
JOINS = ('and', 'but')

# {form of a response, as a sequence of word classes: relative frequency of this form}
# `Opposite` stands for adjectives that say the reverse of the author's opinion.
PATTERNS = {
    'Degree Degree Adjective': 10,
    'Degree Adjective Ending': 20,
    'Adjective and Adjective': 20,
    'Neutral and Adjective': 10,
    'Neutral but Adjective': 5,
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
    """Return all queries, which are equally frequent."""
    return [start.format(subject) for start in STARTS for subject in SUBJECTS]


@functools.cache
def responses(liked: bool) -> Mapping[str, float]:
    """Return {response: probability}; `liked` says whether the authors liked the film."""
    probabilities: dict[str, float] = collections.defaultdict(float)
    for pattern, weight in PATTERNS.items():
        prefixes = {(): weight / sum(PATTERNS.values())}
        for part in pattern.split():
            prefixes = dict(_extended(prefixes, part, liked))
        for words, probability in prefixes.items():
            probabilities[' '.join(words)] += probability
    return dict(probabilities)


def _extended(
    prefixes: dict[tuple[str, ...], float], part: str, liked: bool
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (words, probability) for each response prefix extended by each word of a word class."""
    pools = {
        'Degree': DEGREES,
        'Negation': NEGATIONS,
        'Ending': ENDINGS,
        'Neutral': NEUTRAL,
        'Adjective': PRAISE if liked else BLAME,
        'Opposite': BLAME if liked else PRAISE,
    }
    for words, probability in prefixes.items():
        pool = [word for word in pools.get(part, (part,)) if word not in words]
        is_rarer = part in ('Adjective', 'Opposite')  # stronger adjectives are rarer
        weights = [1 / abs(VALUES[word]) if is_rarer else 1 for word in pool]
        for word, weight in zip(pool, weights, strict=True):
            yield (*words, word), probability * weight / sum(weights)


def generator(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield random reviews without end; the same seed and split give the same reviews."""
    rng = random.Random(f'reviews {mode} {seed}')
    subjects = list(SUBJECTS)
    texts = {}
    cumulative = {}
    for liked in (False, True):
        texts[liked] = list(responses(liked))
        cumulative[liked] = list(itertools.accumulate(responses(liked).values()))
    while True:
        subject = rng.choice(subjects)
        liked = rng.random() < SUBJECTS[subject]
        query = rng.choice(STARTS).format(subject)
        response = rng.choices(texts[liked], cum_weights=cumulative[liked])[0]
        yield f'{query} {response}'


def labelled_reviews(mode: str, seed: int = 0) -> Iterator[tuple[str, float]]:
    """Yield endlessly (review, fraction of simulated readers who took the review for praise)."""
    rng = random.Random(f'readers {mode} {seed}')
    for review in generator(mode, seed):
        log_odds = sentiment(review.split()[-RESPONSE:])
        probability = 1 / (1 + math.exp(-log_odds))
        positive = sum(rng.random() < probability for _ in range(READERS))
        yield review, positive / READERS


def sentiment(words: Iterable[str]) -> float:
    """Return the sentiment of a response, roughly from -5 (blame) to 5 (praise)."""
    total = 0
    factor = 1  # factor for the next adjective's value, from words such as `very` and `not`
    for word in words:
        if word == 'but':
            total *= 0.5  # words after `but` count more than words before it
        elif word in VALUES:
            total += factor * VALUES[word]
            factor = 1
        factor *= DEGREES.get(word, 1) * NEGATIONS.get(word, 1)
    return total
