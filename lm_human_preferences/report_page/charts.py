"""Layout of line charts: points, axes and events, which templates/chart.jinja draws as SVG."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# Pixels in which the points are, of 500 by 260: from left to right, and from the bottom up.
ACROSS, UP = (52, 488), (218, 22)
MOST_POINTS = 400  # of a curve; a screen shows no more of them
COLOURS = 6  # that the style sheet has: s0, s1, ...
MOST_EVENTS = 200  # that are drawn
MOST_DIGITS = 4  # of a number on an axis, after the point
STEP = 'step'  # of a training: there is none between two others
LINE, POINTS, DASHED = 'line', 'points', 'dashed'


class Series(NamedTuple):
    """Points of a chart, in the order of x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = LINE  # or DASHED, POINTS
    colour: int = 0  # points have a shape by it, too
    texts: Sequence[str] = ()  # beside points

    def points(self) -> list[tuple[float, float, str]]:
        """Return (x, y, text) of each point whose numbers are finite."""
        texts = itertools.chain(self.texts, itertools.repeat(''))
        points = zip(self.xs, self.ys, texts, strict=False)
        return [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]


class Event(NamedTuple):
    """Something that happened at `x`: a line across the chart. kind: a class of the style sheet."""

    x: float
    kind: str
    text: str


class Scale(NamedTuple):
    """Numbers from `low` to `high` as pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[tuple[float, str]]  # round numbers and their texts

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class Chart(NamedTuple):
    """A chart to draw. identity: unique in the page; x, y: names of the axes."""

    identity: str
    title: str
    x: str
    y: str
    series: list[Series]
    events: Sequence[Event]
    across: Scale
    up: Scale


def layout(
    title: str,
    x: str,
    y: str,
    series: Sequence[Series],
    events: Sequence[Event] = (),
    *,
    identity: str,
) -> Chart | None:
    """Lay out a chart; None where no series has a point."""
    shown = [each for each in map(_shown, series) if each.xs]
    if not shown:
        return None
    events = events[:MOST_EVENTS]
    xs = [event.x for event in events]
    ys: list[float] = []
    for each in shown:
        xs += each.xs
        ys += each.ys
    across = _scale(xs, ACROSS, most=7, least=1.0 if x == STEP else 0.0)
    up = _scale(ys, UP, most=5, margin=0.05)
    return Chart(identity, title, x, y, shown, events, across, up)


def thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Thin a curve to MOST_POINTS points: the least and the greatest of neighbours."""
    if len(xs) <= MOST_POINTS:
        return list(xs), list(ys)
    size = math.ceil(2 * len(xs) / (MOST_POINTS - 4))
    kept = {0, len(xs) - 1}
    for begin in range(0, len(xs), size):
        group = range(begin, min(begin + size, len(xs)))
        kept |= {min(group, key=ys.__getitem__), max(group, key=ys.__getitem__)}
    numbers = sorted(kept)
    return [xs[number] for number in numbers], [ys[number] for number in numbers]


def number(value: float) -> str:
    """Format a number with about three digits."""
    if 1000 <= abs(value) < 100_000:
        text = f'{value:.0f}'
    elif value == 0 or 0.001 <= abs(value) < 1000:
        text = f'{value:.3g}'
    else:
        text = f'{value:.2e}'
    return text.replace('-', '−')


def _shown(series: Series) -> Series:
    """Return the finite numbers alone; of a line only as many as can be seen."""
    points = series.points()
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    if series.kind != POINTS:
        xs, ys = thinned(xs, ys)
    return series._replace(xs=xs, ys=ys, texts=[text for _, _, text in points])


def _scale(
    values: Sequence[float],
    pixels: tuple[float, float],
    *,
    most: int,
    least: float = 0.0,
    margin: float = 0.0,
) -> Scale:
    """Return the scale of an axis with about `most` ticks, at least `least` apart.

    margin: beyond the values, as a share of their range.
    """
    low, high = min(values), max(values)
    beyond = (high - low) * margin
    if low == high:
        beyond = abs(low) / 2 or 1
    low, high = low - beyond, high + beyond
    rough = max((high - low) / most, least)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ticks = [round(place * step, 12) for place in places]
    return Scale(low, high, *pixels, [(value, _tick(value, step)) for value in ticks])


def _tick(value: float, step: float) -> str:
    """Format a number on an axis, with enough digits to differ from its neighbours."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits > MOST_DIGITS or abs(value) >= 100_000:
        return number(value)
    return f'{value:.{digits}f}'.replace('-', '−')
