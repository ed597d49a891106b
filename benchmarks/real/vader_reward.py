"""Twice VADER's compound score of a response, -2 to 2: how positive its words are."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

ANALYZER = SentimentIntensityAnalyzer()


def score(queries: list[str], responses: list[str]) -> list[float]:
    """Return a number for each of `responses`."""
    return [2 * ANALYZER.polarity_scores(response)['compound'] for response in responses]
