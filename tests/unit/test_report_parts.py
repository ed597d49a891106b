"""Parts of the page that tells what runs were: charts, samples, texts."""

import hashlib
import json
import re

import pytest
from page_rules import sections_of
from run_folders import (
    EVALUATION,
    EXPERIMENTS,
    write_command,
    write_samples,
    write_settings,
)

from lm_human_preferences.hparams import policy_options
from lm_human_preferences.report_page import (
    charts,
    compared_runs,
    frontier,
    provenance,
    render,
    safe_text,
    sample_choice,
    training_curves,
)
from lm_human_preferences.report_page.charts import Event, Series
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs import run_files, run_record
from lm_human_preferences.runs.curves import Log, LoggedCurve


def drawn(chart):
    return render._template('chart.jinja').module.figure(chart)


def looks_of(chart):
    return [(each.kind, each.colour % charts.COLOURS) for each in chart.series]


def test_points_are_where_the_axes_say():
    """From 0 to 10 is 436 pixels, and from 0 to 1, with a margin of .05, 196."""
    line = Series('score', [0, 5, 10], [0.0, 1.0, float('nan')])
    chart = charts.layout('T', 'step', 'y', [line, Series('n', [10], [0.0])], identity='i')
    assert 'points="52.0,209.1 270.0,30.9" data-name="score"' in drawn(chart)
    assert re.findall('class="tick"[^>]*>([^<]*)<', drawn(chart))[-1] == '10'
    nothing = line._replace(ys=[float('inf')] * 3)
    assert charts.layout('T', 'x', 'y', [nothing], identity='i') is None


def test_a_chart_says_what_it_shows_and_nothing_in_it_is_markup():
    line = Series('<b>', [0, 1], [2.0, -3.0])
    event = Event(1, 'alarm', '"><script>')
    svg = drawn(charts.layout('<T>', 'x', 'y', [line], [event], identity='i'))
    assert '<title id="i-t">&lt;T&gt;</title>' in svg
    assert 'y: &lt;b&gt; from 2 at 0 to −3 at 1; &#34;&gt;&lt;script&gt; at 1</desc>' in svg
    assert '<script' not in svg


@pytest.mark.parametrize(
    'x, ys, expected',
    [
        ('step', [3.291, 3.2935], '3.291 3.292 3.293 0 1 2'),
        ('step', [-0.1, 0.1], '−0.10 −0.05 0.00 0.05 0.10 0 1 2'),
        ('KL', [0, 4e6], '0 1.00e+06 2.00e+06 3.00e+06 4.00e+06 0.0 0.5 1.0 1.5 2.0'),
        ('KL', [0, 1e-9], '0 5.00e−10 1.00e−09 0.0 0.5 1.0 1.5 2.0'),
    ],
)
def test_numbers_on_an_axis_differ_and_steps_are_whole(x, ys, expected):
    chart = charts.layout('T', x, 'y', [Series('a', [0, 2], ys)], identity='i')
    ticks = [text for axis in (chart.up, chart.across) for _, text in axis.ticks]
    assert ticks == expected.split()


def test_runs_and_curves_of_one_chart_look_different(tmp_path):
    """Runs of the same colour have other lines."""
    names = ['objective/score', 'ppo/val/mean', 'ppo/returns/mean']
    log = Log(dict.fromkeys(names, LoggedCurve((0, 1), (1.0, 2.0))))
    runs = [RunFacts(str(tmp_path), logs={'train_policy': log})] * 13
    (chart,) = compared_runs.comparison([f'run {i}' for i in range(13)], runs)['charts']
    looks = looks_of(chart)
    assert len(set(looks[:12])) == 12 and looks[12] == looks[0]
    _, value = training_curves.charts_of_training(runs[0], 'run')
    assert [colour for _, colour in looks_of(value)] == [0, 1]


def test_settings_in_which_policies_differ_are_compared(tmp_path):
    runs = [RunFacts(str(tmp_path), policy=policy_options.HParams()) for _ in range(2)]
    runs[1].policy.ppo.lr = 0.5
    runs[1].policy.run.override_from_dict({'serve': 'on', 'serve.labellers': 'anna'})
    for has_names in (True, False):
        rows = compared_runs.comparison(['a', 'b'], runs, has_names=has_names)['settings']
        assert ['--ppo.lr', str(runs[0].policy.ppo.lr), '0.5'] in rows
        assert any('anna' in row for row in rows) == has_names


@pytest.mark.parametrize(
    'seconds, text',
    [(7.44, '7.4 s'), (61, '1 min 1 s'), (3599.4, '59 min 59 s'), (7384, '2 h 3 min')],
)
def test_durations_are_said_as_people_do(seconds, text):
    assert provenance.duration(seconds) == text


def test_kinds_of_points_have_colours_of_their_own():
    reward = EVALUATION['rewards']['reward model']
    points = {name: reward['policy'] for name in ('best_of_4', 'optimum')}
    found = {**EVALUATION, 'rewards': {'reward model': {**reward, **points}}}
    ((_, chart),) = frontier.evaluation(found, 'i')['rewards']
    colours = [colour for kind, colour in looks_of(chart) if kind == charts.POINTS]
    assert len(set(colours)) == len(colours) == 4


def test_a_long_curve_keeps_its_ends_and_extremes():
    values = [0.0] * 5000
    values[1234], values[4321] = 7.0, -7.0
    xs, ys = charts.thinned(range(5000), values)
    assert len(xs) <= charts.MOST_POINTS and sorted(xs) == xs
    assert {0, 1234, 4321, 4999} <= set(xs) and (min(ys), max(ys)) == (-7.0, 7.0)
    whole = range(charts.MOST_POINTS)
    assert charts.thinned(whole, values)[0] == list(whole)


@pytest.mark.parametrize(
    'value, expected',
    [(0, '0'), (-0.25, '−0.25'), (1000, '1000'), (1234.4, '1234'), (3e-7, '3.00e−07'), (2.0, '2')],
)
def test_numbers_are_short(value, expected):
    assert charts.number(value) == expected


def test_changed_words_are_marked():
    parts = safe_text.changes('a good film', 'a very good\nplot')
    assert [*parts] == [('a ', False), ('very ', True), ('good\n', False), ('plot', True)]


def test_what_is_not_seen_is_shown_and_long_texts_lose_their_middle():
    assert safe_text.plain('a\u202eb\x1b[31m\nc') == 'a\\u202eb\\x1b[31m\nc'
    long = safe_text.plain('x' * 10_000)
    assert len(long) < 1600 and '8,500 more characters' in long
    # A text of others does not make a line, which would be a sentence.
    assert render._escaped('a\n<b>') == 'a&#10;&lt;b&gt;'


def test_samples_are_chosen_by_chance_and_by_score(tmp_path):
    queries = [f'q{number}' for number in range(8)]
    queries[4] += '\u2028'  # after which a line of JSON goes on
    scores = dict(zip(queries, (3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0), strict=True))
    kls = {'q2': 7.0, 'q7': 9.0, 'q1': 20.0}
    for step in (0, 5, 10):
        answers = [
            (query, f'{query} {step}', scores[query], kls.get(query, 0.0)) for query in queries
        ]
        write_samples(tmp_path, {step: answers})
    cut = {'step': 11, 'query': 'q3', 'response': 'r', 'score': 1.5, 'kl': 0, 'tokens_after_end': 7}
    with (tmp_path / 'samples.jsonl').open('a') as file:
        file.write(f'[]\n{{"query": 1}}\n{json.dumps(cut)}\n{{"step": 3')
    found = sample_choice.choices(str(tmp_path), 'run')
    chosen = {choice: [query.text for query in given] for choice, given in found.items()}
    again = sample_choice.choices(str(tmp_path), 'run')['random']
    assert [query.text for query in again] == chosen['random']
    assert len(set(chosen.pop('random'))) == sample_choice.AT_RANDOM
    # q1 is unlikely, too, but its score is low.
    assert chosen == {'best': ['q4', 'q6'], 'worst': ['q1', 'q3'], 'unlikely': ['q7', 'q2']}
    assert [answer.step for answer in found['best'][0].three()] == [0, 5, 10]
    assert found['best'][0].answers[-1].parts[-1] == ('10', True)
    assert found['worst'][1].answers[-1].cut == '[7 tokens cut]'


def test_a_page_has_the_checksums_of_what_a_run_learned_from_and_made(tmp_path):
    run_record.write_labels(str(tmp_path), 'train_policy', {'digest': 'a' * 64})
    (tmp_path / run_files.FUNCTION).write_bytes(b'code')
    checkpoints = tmp_path / run_files.POLICY.finished
    checkpoints.mkdir(parents=True)
    (checkpoints / 'model.ckpt-3.index').write_bytes(b'index')
    what, digests = zip(*provenance._digests(str(tmp_path)), strict=True)
    assert digests == (
        'a' * 64,
        *(hashlib.sha256(each).hexdigest() for each in (b'code', b'index')),
    )
    assert what[:2] == ('the labels', "the reward's file") and what[2].startswith('policy, ')


def test_a_command_is_told_with_its_machine_and_versions(tmp_path):
    write_settings(tmp_path, 'train_policy', 'test', ranks=1)
    begun, ended = '2026-11-02T08:00:00Z', '2026-11-02T09:00:00Z'
    machine = {'peak_gpu_gigabytes': 1.25, 'commit_is_clean': False}
    write_command(tmp_path, 'train', begun, ended, seeds={'policy': 5}, **machine)
    page = sections_of(render.page([str(tmp_path)], EXPERIMENTS))['Where it comes from']
    for fact in (
        '2026-11-02 08:00:00 (UTC), finished after 1 min 0 s.',
        'AMD EPYC (avx2 avx512f), 1 rank, 1 thread, policy with seed 5, at most 0.8 GB',
        'lm-human-preferences 1.0.0, python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0',
        'commit 3ce96054ce35, with changes that were not committed.',
    ):
        assert fact in page, fact


@pytest.mark.parametrize('count, recent', [(1, 0), (19, 18), (20, 18.5), (100, 94.5)])
def test_curves_are_compared_by_the_mean_of_their_last_tenth(count, recent):
    assert LoggedCurve(tuple(range(count)), tuple(map(float, range(count)))).recent == recent
