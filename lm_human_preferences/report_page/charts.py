"""Line charts as SVG, in the colours of the page that they are in.

Colours, fonts and widths of lines are the style sheet's. A chart says in words what it shows, for
those who cannot see it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from lm_human_preferences.report_page.safe_text import plain

WIDTH, HEIGHT = 500, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 22, 42  # margins of the plot, where its labels are
MOST_POINTS = 400  # of a curve; a screen shows no more of them
COLOURS = 6  # that the style sheet has: s0, s1, ...
LONGEST_NAME, LONGEST_EVENT = 80, 300  # characters
MOST_EVENTS = 200  # that are drawn
MOST_DIGITS = 4  # of a number on an axis, after the point
STEP = 'step'  # of a training: there is none between two others
LINE, POINTS, DASHED = 'line', 'points', 'dashed'
_SHAPES = (
    'M0-5a5 5 0 1 0 .01 0z',  # a circle, a star, a diamond, triangles, a square
    'M0-7L1.8-2.2 6.7-2.2 2.7.9 4.1 5.7 0 2.8-4.1 5.7-2.7.9-6.7-2.2-1.8-2.2z',
    'M0-6L5 0 0 6-5 0z',
    'M0-6L5.5 4-5.5 4z',
    'M-4.5-4.5h9v9h-9z',
    'M0 6L5.5-4-5.5-4z',
)


class Series(NamedTuple):
    """Points of a chart, in the order of x.

    kind: LINE, DASHED or POINTS. colour: a number; points have a shape by it, too. texts: beside
    points.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = LINE
    colour: int = 0
    texts: Sequence[str] = ()


class Event(NamedTuple):
    """Something that happened at `x`: a line across the chart. kind: a class of the style sheet."""

    x: float
    kind: str
    text: str


class Chart(NamedTuple):
    """A drawing and its legend: (name, colour, kind) of each series."""

    title: str
    svg: Markup
    legend: list[tuple[str, int, str]]


class Scale(NamedTuple):
    """Numbers from `low` to `high` as pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a number."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def draw(
    title: str,
    x: str,
    y: str,
    series: Sequence[Series],
    events: Sequence[Event] = (),
    *,
    identity: str,
) -> Chart | None:
    """A chart; None where no series has a point. identity: unique in the page."""
    title = plain(title, LONGEST_NAME)
    events = [
        event._replace(text=plain(event.text, LONGEST_EVENT)) for event in events[:MOST_EVENTS]
    ]
    shown = [_finite(each) for each in series]
    shown = [each for each in shown if each.xs]
    if not shown:
        return None
    xs = [value for each in shown for value in each.xs]
    ys = [value for each in shown for value in each.ys]
    xs += [event.x for event in events]
    across = Scale(*_ends(min(xs), max(xs), padded=False), LEFT, WIDTH - RIGHT)
    up = Scale(*_ends(min(ys), max(ys), padded=True), HEIGHT - BOTTOM, TOP)
    parts = [
        _opening(title, y, shown, events, (across, up), identity),
        *_axes(x, y, across, up),
        *(_event(event, across) for event in events),
        *itertools.chain.from_iterable(_series(each, across, up) for each in shown),
        Markup('</svg>'),
    ]
    legend = [(each.name, each.colour % COLOURS, each.kind) for each in shown]
    return Chart(title, Markup('').join(parts), legend)


def thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS points of a curve: the least and the greatest of neighbours."""
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
    """A number with three digits or so."""
    if value == 0 or 0.001 <= abs(value) < 100_000:
        text = f'{value:.0f}' if abs(value) >= 1000 else f'{value:.3g}'
    else:
        text = f'{value:.2e}'
    return text.replace('-', '−')


def _finite(series: Series) -> Series:
    """The same with plain texts, without numbers that cannot be drawn."""
    series = series._replace(
        name=plain(series.name, LONGEST_NAME),
        texts=[plain(text, LONGEST_NAME) for text in series.texts],
    )
    points = [
        (x, y, series.texts[place] if place < len(series.texts) else '')
        for place, (x, y) in enumerate(zip(series.xs, series.ys, strict=False))
        if math.isfinite(x) and math.isfinite(y)
    ]
    if series.kind != POINTS:
        xs, ys = thinned([x for x, _, _ in points], [y for _, y, _ in points])
        return series._replace(xs=xs, ys=ys)
    xs, ys, texts = ([point[place] for point in points] for place in range(3))
    return series._replace(xs=xs, ys=ys, texts=texts)


def _ends(low: float, high: float, *, padded: bool) -> tuple[float, float]:
    """The ends of an axis, which are never the same."""
    if low == high:
        margin = abs(low) / 2 or 1
        return low - margin, high + margin
    margin = (high - low) * 0.05 if padded else 0
    return low - margin, high + margin


def _ticks(scale: Scale, most: int, least: float = 0.0) -> list[tuple[float, str]]:
    """(a round number, its text) for places on an axis, at most about so many.

    least: the distance that they have at least.
    """
    rough = max((scale.high - scale.low) / most, least)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    values = [round(place * step, 12) for place in range(first, last + 1)]
    return [(value, _tick(value, step)) for value in values]


def _tick(value: float, step: float) -> str:
    """A number on an axis, with digits enough to differ from its neighbours."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits > MOST_DIGITS or abs(value) >= 100_000:
        return number(value)
    return f'{value:.{digits}f}'.replace('-', '−')


def _opening(
    title: str,
    y: str,
    series: Sequence[Series],
    events: Sequence[Event],
    scales: tuple[Scale, Scale],
    identity: str,
) -> Markup:
    """The first tag, with what the chart shows in words. A script reads the numbers in `data`."""
    across, up = scales
    told = [_in_words(each) for each in series]
    told += [f'{event.text} at {number(event.x)}' for event in events[:20]]
    ends = ' '.join(f'{value:.9g}' for value in (across.low, across.high, up.low, up.high))
    box = f'{LEFT} {WIDTH - RIGHT} {HEIGHT - BOTTOM} {TOP}'
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {} {}" aria-labelledby="{i}-t {i}-d"'
        ' data-ends="{}" data-box="{}"><title id="{i}-t">{}</title><desc id="{i}-d">{}: {}</desc>'
    ).format(WIDTH, HEIGHT, ends, box, title, y, '; '.join(told), i=identity)


def _in_words(series: Series) -> str:
    if series.kind == POINTS:
        points = [
            f'{text} {number(y)} at {number(x)}'.strip()
            for x, y, text in zip(series.xs, series.ys, series.texts, strict=True)
        ]
        return f'{series.name} {", ".join(points)}'
    return (
        f'{series.name} from {number(series.ys[0])} at {number(series.xs[0])} to'
        f' {number(series.ys[-1])} at {number(series.xs[-1])}'
    )


def _axes(x: str, y: str, across: Scale, up: Scale) -> Iterator[Markup]:
    for value, text in _ticks(up, 5):
        yield Markup(
            '<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>'
            '<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
        ).format(LEFT, WIDTH - RIGHT, LEFT - 8, up(value) + 4, text, y=up(value))
    for value, text in _ticks(across, 7, least=1.0 if x == STEP else 0.0):
        yield Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
            across(value), HEIGHT - BOTTOM + 18, text
        )
    yield Markup(
        '<line class="axis" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
        '<text class="name" x="{}" y="{}" text-anchor="middle">{}</text>'
    ).format(LEFT, WIDTH - RIGHT, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x, y=HEIGHT - BOTTOM)
    yield Markup('<text class="name" x="4" y="12">{}</text>').format(y)


def _event(event: Event, across: Scale) -> Markup:
    return Markup(
        '<line class="event {}" x1="{x:.1f}" x2="{x:.1f}" y1="{}" y2="{}"><title>{}</title></line>'
    ).format(event.kind, TOP, HEIGHT - BOTTOM, event.text, x=across(event.x))


def _series(series: Series, across: Scale, up: Scale) -> Iterator[Markup]:
    colour = series.colour % COLOURS
    if series.kind != POINTS:
        # A line of one point would not be seen.
        xs, ys = (2 * list(each) if len(each) == 1 else each for each in (series.xs, series.ys))
        points = ' '.join(f'{across(x):.1f},{up(y):.1f}' for x, y in zip(xs, ys, strict=True))
        kind = series.kind if len(xs) == len(series.xs) else f'{series.kind} dot'
        yield Markup('<polyline class="{} s{}" points="{}" data-name="{}"/>').format(
            kind, colour, points, series.name
        )
        return
    for x, y, text in zip(series.xs, series.ys, series.texts, strict=True):
        label = f'{series.name} {text}'.strip()
        yield Markup(
            '<path class="point s{}" d="{}" transform="translate({x:.1f} {y:.1f})">'
            '<title>{}: {} at {}</title></path>'
        ).format(colour, _SHAPES[colour], label, number(y), number(x), x=across(x), y=up(y))
        if text:
            yield Markup('<text class="beside" x="{:.1f}" y="{:.1f}">{}</text>').format(
                across(x) + 8, up(y) - 6, text
            )


def shape(colour: int) -> Markup:
    """The mark of points in a legend."""
    return Markup('<path class="point s{}" d="{}"/>').format(colour, escape(_SHAPES[colour]))
