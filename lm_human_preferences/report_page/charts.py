"""Line charts as SVG, described in words, too. Colours, fonts and widths are the style sheet's."""

import functools
import itertools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jinja2
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
    """Draw a chart; None where no series has a point. identity: unique in the page."""
    title = plain(title, LONGEST_NAME)
    events = [
        event._replace(text=plain(event.text, LONGEST_EVENT)) for event in events[:MOST_EVENTS]
    ]
    shown = [each for each in map(_shown, series) if each.xs]
    if not shown:
        return None
    xs = [event.x for event in events]
    ys: list[float] = []
    legend = []
    for each in shown:
        xs += each.xs
        ys += each.ys
        legend.append((each.name, each.colour % COLOURS, each.kind))
    across = Scale(*_ends(min(xs), max(xs), padded=False), LEFT, WIDTH - RIGHT)
    up = Scale(*_ends(min(ys), max(ys), padded=True), HEIGHT - BOTTOM, TOP)
    svg = _template().render(
        id=identity,
        title=title,
        x=x,
        y=y,
        across=across,
        up=up,
        across_ticks=_ticks(across, 7, least=1.0 if x == STEP else 0.0),
        up_ticks=_ticks(up, 5),
        series=shown,
        events=events,
        words=[*map(_in_words, shown), *map(_event_in_words, events[:20])],
    )
    return Chart(title, Markup(svg), legend)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(os.path.join(os.path.dirname(__file__), 'templates')),
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {'px': '{:.1f}'.format, 'digits': '{:.9g}'.format, 'number': number}
    environment.globals |= {
        'width': WIDTH,
        'height': HEIGHT,
        'colours': COLOURS,
        'shapes': _SHAPES,
    }
    return environment.get_template('chart.svg')


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
    """Return plain texts, and finite numbers alone; of a line only as many as can be seen."""
    xs: list[float] = []
    ys: list[float] = []
    texts = []
    for x, y, text in series.points():
        xs.append(x)
        ys.append(y)
        texts.append(plain(text, LONGEST_NAME))
    if series.kind != POINTS:
        xs, ys = thinned(xs, ys)
    return series._replace(name=plain(series.name, LONGEST_NAME), xs=xs, ys=ys, texts=texts)


def _ends(low: float, high: float, *, padded: bool) -> tuple[float, float]:
    """Return the ends of an axis, which are never the same."""
    if low == high:
        margin = abs(low) / 2 or 1
        return low - margin, high + margin
    margin = (high - low) * 0.05 if padded else 0
    return low - margin, high + margin


def _ticks(scale: Scale, most: int, least: float = 0.0) -> list[tuple[float, str]]:
    """Return (round number, its text) for places on an axis, at least `least` apart."""
    rough = max((scale.high - scale.low) / most, least)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    ticks = []
    for place in range(first, last + 1):
        value = round(place * step, 12)
        ticks.append((value, _tick(value, step)))
    return ticks


def _tick(value: float, step: float) -> str:
    """Format a number on an axis, with enough digits to differ from its neighbours."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits > MOST_DIGITS or abs(value) >= 100_000:
        return number(value)
    return f'{value:.{digits}f}'.replace('-', '−')


def _in_words(series: Series) -> str:
    if series.kind == POINTS:
        points = [f'{text} {number(y)} at {number(x)}'.strip() for x, y, text in series.points()]
        return f'{series.name} {", ".join(points)}'
    return (
        f'{series.name} from {number(series.ys[0])} at {number(series.xs[0])} to'
        f' {number(series.ys[-1])} at {number(series.xs[-1])}'
    )


def _event_in_words(event: Event) -> str:
    return f'{event.text} at {number(event.x)}'


def shape(colour: int) -> Markup:
    """Return the mark of points in a legend."""
    return Markup('<path class="point s{}" d="{}"/>').format(colour, escape(_SHAPES[colour]))
