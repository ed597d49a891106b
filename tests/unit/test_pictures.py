"""Contents of pictures: lines, bands, bars and their colours, from made-up rows."""

import numpy as np
import pytest
from figures import figure_plots

from lm_human_preferences.evaluation import picture, plots


@pytest.fixture
def pictures(monkeypatch):
    saved = {}
    monkeypatch.setattr(plots, 'save', lambda figure, path: saved.update({path: figure}))
    return saved


def lines_of(axes):
    return [
        (line.get_label(), line.get_linestyle(), *map(list, line.get_data())) for line in axes.lines
    ]


def bands_of(axes):
    return [tuple(band.get_paths()[0].get_extents().intervaly) for band in axes.collections]


CURVE = [
    {'labels': 8, 'held_out': 30, 'chance': 0.25, 'accuracy': [0.25, 0.75], 'low': [0.125, 0.25]},
    {'labels': 16, 'held_out': 30, 'chance': 0.25, 'accuracy': [0.5, 1.0], 'low': [0.25, 0.5]},
]
for row in CURVE:
    row.update(agreement=[0.5, 0.5], high=[1.0, 1.0], interval=(sum(row['low']) / 2, 1.0))
COMPARED = {'win_rate': 0.75, 'low': 0.5, 'high': 0.875, 'policy': 'initial', 'against': 'a/run/'}


def test_the_picture_of_a_report_on_labels(pictures):
    of_few_queries = {**COMPARED, 'win_rate': 0.625, 'low': 0.0, 'high': 1.0}
    report = {'learning_curve': CURVE, 'comparisons': [COMPARED, of_few_queries]}
    picture.draw_labels(report, 'out.png')
    left, right = pictures['out.png'].axes
    assert [line[1:] for line in lines_of(left)] == [
        ('None', [8, 8], [0.25, 0.75]),
        ('None', [16, 16], [0.5, 1.0]),
        ('-', [8, 16], [0.5, 0.75]),
        ('--', [0, 1], [0.25, 0.25]),
    ]
    assert bands_of(left) == [(0.1875, 1.0)]
    assert left.get_ylabel() == 'accuracy (30 labels)' and left.get_xscale() == 'log'
    assert [tick.get_text() for tick in left.get_xticklabels()] == ['8', '16']
    markers = [list(bars.lines[0].get_ydata()) for bars in right.containers]
    bars = [[part.get_segments() for part in each.lines[2]] for each in right.containers]
    assert markers == [[0.75], [0.625]]
    assert np.array(bars[0]).tolist() == [[[[0, 0.5], [0, 0.875]]]] and not bars[1]
    assert [tick.get_text() for tick in right.get_xticklabels()] == ['run\nover initial'] * 2
    # Without a chance, the curve is of correlations.
    rows = [{**row, 'chance': None, 'interval': None} for row in CURVE]
    picture.draw_labels({'learning_curve': rows, 'comparisons': []}, 'out.png')
    (axes,) = pictures['out.png'].axes
    assert axes.get_ylabel() == 'correlation (30 labels)'
    assert [line[3] for line in lines_of(axes)] == [[0.5, 0.5]] * 3 and not bands_of(axes)


def row(*values):
    names = 'access episodes target seed kl known_reward'.split()
    return dict(zip(names, values, strict=True))


FRONTIER = [
    {'kl': kl, 'known_reward': reward} for kl, reward in ((0.0, 0.0), (2.0, 3.0), (8.0, 4.0))
]


def test_figures_have_a_line_for_each_access(pictures):
    rows = [
        row(access, episodes, 2.0, seed, 2.0, reward + seed)
        for access, rewards in (('direct', (1.0, 2.0)), ('64', (0.5, 1.0)))
        for episodes, reward in zip((0, 1000), rewards)
        for seed in (0, 1)
    ]
    figure_plots.figure2('out.png', rows, 2.0, 3.5)
    left = pictures['out.png'].axes[0]
    assert lines_of(left) == [
        ('optimum', '--', [0, 1], [3.5, 3.5]),
        ('direct access', '-', [0, 1000], [1.5, 2.5]),
        ('64 labels', '-', [0, 1000], [1.0, 1.5]),
    ]
    assert bands_of(left) == [(1.0, 3.0), (0.5, 2.0)]
    rows = [
        row(access, episodes, target, 1, 2 * target, reward / 4 + target + episodes / 8000)
        for access, reward in (('direct', 1), ('64', 0))
        for episodes in (1000, 2000)
        for target in (1.0, 2.0)
    ]
    figure_plots.figure3('out.png', rows, FRONTIER)
    optimum, *lines = lines_of(pictures['out.png'].axes[0])
    assert optimum[2:] == ([0, 2, 4.2], [0, 3, pytest.approx(3 + 2.2 / 6)])
    assert lines[0][1:] == ('-', [2, 4], [1.375, 2.375])
    assert lines[4][1:] == (':', [2, 4], [1.25, 2.25])


@pytest.fixture
def axes():
    (empty,) = plots.panels()[1]
    return empty


def test_the_frontier_has_a_band_and_goes_on_at_its_last_reward(axes):
    plots.draw_frontier(axes, [0, 2, 4], [1, 2, 3], [0.25, 0.5, 1], label='best', up_to=8)
    assert lines_of(axes) == [
        ('best', '-', [0, 2, 4], [1, 2, 3]),
        ('best, at least', ':', [4, 8], [3, 3]),
    ]
    assert bands_of(axes) == [(0.75, 4)]


def test_policies_are_markers_with_bars_and_captions(axes):
    errors = ([0.25, 0.5], None)
    style = {'marker': 's', 'colour': plots.GREEN, 'label': 'some'}
    plots.draw_points(axes, [1, 2], [3, 4], errors=errors, texts=('a', 'b'), **style)
    plots.draw_points(axes, [5], [6], **{**style, 'marker': '*'})
    marker, _, (bars,) = axes.containers[0].lines
    star = axes.containers[1].lines[0]
    looks = marker.get_marker(), marker.get_color(), marker.get_linestyle()
    assert looks == ('s', plots.GREEN, 'None')
    assert np.array(bars.get_segments()).tolist() == [[[0.75, 3], [1.25, 3]], [[1.5, 4], [2.5, 4]]]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [('a', (1, 3)), ('b', (2, 4))]
    assert star.get_markersize() > marker.get_markersize()
    assert star.get_zorder() > marker.get_zorder()
