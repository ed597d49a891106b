"""Contents of pictures: lines, bands, bars and their colours, from made-up rows."""

import plots
import pytest
from figures import figure_plots


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


def test_the_frontier_goes_on_at_its_last_reward(axes):
    plots.draw_frontier(axes, [0, 2, 4], [1, 2, 3], label='best', up_to=8)
    assert lines_of(axes) == [
        ('best', '-', [0, 2, 4], [1, 2, 3]),
        ('best, at least', ':', [4, 8], [3, 3]),
    ]
