"""The report of runs: its facts, its tables, its chart, and the texts of others in it."""

import json
import math
import re

import pytest
from label_folders import answer_all, make_folder, say
from page_rules import problems, sections_of
from run_folders import (
    EVALUATION,
    EXPERIMENTS,
    write_command,
    write_curves,
    write_events,
    write_learned,
    write_run,
    write_samples,
    write_settings,
)
from sample_files import write_lines
from two_runs import LABELLERS, birch, make_two_runs

from lm_human_preferences import storage
from lm_human_preferences.labels.folder import VALIDATION, LabelFolder
from lm_human_preferences.report import facts, page
from lm_human_preferences.report.facts import Text, number
from lm_human_preferences.report.run import read_run

(OWN,) = EVALUATION['rewards'].values()


def read(run):
    return read_run(str(run))


def page_of(*runs, has_names=True):
    return page.page([str(run) for run in runs], EXPERIMENTS, has_names=has_names)


def evaluated(run, **results):
    storage.write_json(str(run / 'evaluation.json'), {**EVALUATION, **results})


def minds(run):
    return [' '.join(warning) for warning in facts.collected(read(run))['mind']]


def rows_of(table):
    return {row[0]: tuple(row[1:]) for row in table.rows}


def test_numbers_are_shown_as_what_they_are():
    shown = map(number, (-0.001, -1234.5, 12800, 3e12, float('nan'), -1e999, -(10**400), None))
    found = ' '.join(shown)
    assert found == '0.00 −1,234.50 12,800 3.00e+12 NaN −∞ −1.00e+400 not recorded'


@pytest.mark.parametrize(
    'text, shown',
    [
        ('می\u200cخواهم', 'می\u200cخواهم'),  # a joiner between letters
        ('👩\u200d💻 🏳\ufe0f\u200d🌈 1\ufe0f\u20e3 ©\ufe0f', ...),
        ('\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f', ...),
        ('a\u200db\u200c', 'a[U+200D]b[U+200C]'),  # between ASCII, and at an end
        ('שלום\u200f\u200fעולם', 'שלום[U+200F][U+200F]עולם'),
        ('user\u202egnp.exe', 'user[U+202E]gnp.exe'),
        (
            'a\u2066b\u2028c\x00\x1b\ue000\ud800',
            'a[U+2066]b[U+2028]c[U+0000][U+001B][U+E000][U+D800]',
        ),
        ('a\tb\r\nc\u3000d\xa0e', 'a\tb\nc\u3000d\xa0e'),
        ('\U000e0041\u115f', '[U+E0041][U+115F]'),
        ('<b> & "x"', '&lt;b&gt; &amp; &#34;x&#34;'),
    ],
)
def test_what_has_an_effect_or_is_invisible_is_shown_as_its_code(text, shown):
    found = re.sub('<span class="mark">(.*?)</span>', r'[\1]', page.inline(text))
    assert found == (text if shown is ... else shown)


@pytest.mark.parametrize(
    'text, shown',
    [
        ('', '[empty]'),
        ('a ', 'a[1 blank]'),
        ('a\n\n\n', 'a[3 line ends]'),
        ('Try:\n```\nx = 1\n```\nDone', 'Try:\n{```\nx = 1\n```}\nDone'),
        ('if a:\n    b\n    c', '{if a:\n    b\n    c}'),
        ('x' * 5000, 'x' * 1000 + ' … 3,000 characters … ' + 'x' * 1000),
    ],
)
def test_a_text_is_whole_with_its_end_and_its_code(text, shown):
    found = re.sub(
        '<span class="mono"[^>]*>(.*?)</span>', r'{\1}', page.inline(Text(text)), flags=re.S
    )
    found = re.sub('<span class="mark">(.*?)</span>', r'[\1]', found)
    assert re.sub('</?bdi[^>]*>', '', found) == shown


AMBER = {  # was interrupted, killed, and then came close to the best possible
    'amber': [
        '^mock_sentiment: continue a film review .* finished .* 5,120 of 5,120',
        'By the known reward −8 % ± 2 % of the possible gain −0.20 → −0.61',
        'By the reward model, which it was trained on 91 % ± 2 % of the possible gain −0.19 → 1.34',
        r'64 labels are simulated: .* 2 times the run was resumed',
    ],
    facts.LEARN: ['Held back by a KL, target in nats 2.00'],
    facts.GAIN: [
        'KL, nats reward model known reward Before 0.00 −0.19 −0.20',
        r'After 1\.97 ± 0\.02 1\.34 ± 0\.06 −0\.61 ± 0\.06 Best possible',
        'Fraction of the possible gain 91 % ± 2 %',
    ],
    facts.SURE: ['9 of 16 33 % to 77 % 25 %'],
    facts.SAYS: [r'weak and bad 0 0\.00 moving and superb 0 1\.40 best score'],
    facts.MADE: [
        r'train_policy mock_sentiment amber \\ --mpi 2 \\ --ppo\.total',
        'how interrupted, .* no end is recorded, .* how finished, .* ranks 2, processor AMD EPYC',
        'ppo.lr 0.003 0.002',
    ],
}
BIRCH = {  # learned from two people, and an alarm stopped it
    'birch': [
        '^test: .* failed: UserError .* 768 of 6,400 responses',
        r'0\.40 → −0\.90 mean reward, before .* 1 alarms.* KL 64\.50, target 6\.00\.',
    ],
    facts.GAIN: [r'of the last step\. .* Before 0\.50 0\.40 After 64\.50 −0\.90'],
    facts.SURE: [
        'had not seen 62 % none 25 % Two labellers agree .* 3 of 4 30 % to 95 % 25 %',
        'Its distance from the best policy possible not measured',
    ],
    facts.LABELS: ['Learned from 8 .* hedda people 4 0 2.0 3 of 4 .* ivo people 4 0 5.0 3 of 4'],
}


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """Return {run: sections of its page}, and under 'all' those of the page about all of them."""
    runs = make_two_runs(tmp_path_factory.mktemp('runs'))
    texts = {name: page_of(run) for name, run in runs.items()} | {'all': page_of(*runs.values())}
    assert problems(texts['all']) == []
    return {name: sections_of(text) for name, text in texts.items()}


@pytest.mark.parametrize('run, said', [('amber', AMBER), ('birch', BIRCH)])
def test_what_is_said_of_two_runs(pages, run, said):
    for section, patterns in said.items():
        for pattern in patterns:
            assert re.search(pattern, pages[run][section]), pages[run][section]


@pytest.mark.parametrize('command', ['train_policy', 'train_reward'])
def test_a_run_that_has_only_begun(tmp_path, command):
    write_settings(tmp_path / 'run', command, 'test', ranks=1)
    said = sections_of(page_of(tmp_path / 'run'))
    assert 'not recorded' in said['run'] and 'Cannot be read: tb/' in said['run']
    assert said.keys().isdisjoint({facts.GAIN, facts.SAYS, facts.LABELS})
    is_policy = 'best policy possible not measured' in said[facts.SURE]
    assert is_policy == (command == 'train_policy')


def test_several_runs_are_compared_and_told_one_by_one(pages):
    said = pages['all']
    assert 'birch – – 62 % 8 0.40 → −0.90' in said[facts.GAIN]
    assert 'ppo.lr 0.003 0.002 0.01' in said[facts.MADE] and {'2 runs', 'birch'} <= said.keys()


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    runs = [tmp_path / folder / 'run' for folder in 'abcd']
    for run in runs:
        write_settings(run, 'train_policy', 'test', ranks=1)
        write_samples(run, {step: [('abc', 'def', 0.5, 0.1)] for step in (0, 9)})
    found = sections_of(page_of(*runs, f'{tmp_path}/b/../a/run'))
    assert {'4 runs', *map(str, runs)} <= found.keys()
    assert '<h1>run</h1>' in page_of(runs[0], f'{runs[0]}/')
    heads = re.findall('Text given Before Score (.*?) abc', found[facts.SAYS])
    assert heads == [f'{runs[0]} Score {runs[1]} Score {runs[2]} Score', f'{runs[3]} Score']


def test_labellers_need_not_be_named(tmp_path):
    runs = [tmp_path / 'run', birch(tmp_path / 'birch')]
    settings = {'labels__source': f'{runs[1]}/labels', 'labels__without': 'ivo'}
    write_settings(runs[0], 'train_reward', 'test', ranks=1, **settings)
    write_learned(runs[0], source=f'{runs[1]}/labels')
    line = "./launch.py train_reward test x '--labels.without=ivo, hedda'"
    write_command(runs[0], line, '2026-11-08T08:00:00Z')
    for has_names in (True, False):
        text = page_of(*runs, has_names=has_names)
        assert [name in text for name in LABELLERS] == [has_names] * 2
        assert ('it names labellers' in text) == ('labeller 1' in text) == (not has_names)


def test_a_command_can_be_pasted(tmp_path):
    write_settings(tmp_path, 'train_policy', 'test', ranks=1)
    write_command(tmp_path, "./launch.py train_policy x --task.end_text 'a --b' --ppo.lr=0.1", '')
    found = facts.commands(read(tmp_path)).rows[0][1]
    options = ["--task.end_text 'a --b'", '--ppo.lr=0.1']
    assert found.split(' \\\n    ') == ['./launch.py train_policy x', *options]


def test_the_samples_are_the_best_the_least_sure_the_least_likely_and_the_worst(tmp_path):
    """No query twice, and numbers that are none, or have 400 digits, are shown as what they are."""
    write_settings(tmp_path, 'train_policy', 'test', ranks=1)
    scores = dict(zip('abcdefghij', (3, 1, 10**400, 4, 9.5, -1e999, 2, 5, 6, 7), strict=True))
    scores['g'] = float('nan')
    lines = []
    for step in (0, 10):
        for query, score in scores.items():
            sample = {'step': step, 'query': query, 'response': f'{query} {step}', 'score': score}
            lines.append({**sample, 'kl': {'d': 10.0, 'c': 11.0}.get(query, 0.5), 'score_std': 0.1})
    lines[-1]['score_std'] = 0.7  # of j
    write_lines(tmp_path / 'samples.jsonl', lines)
    with (tmp_path / 'samples.jsonl').open('a') as file:
        file.write('[]\n{"query": 1}\n{"step": 3')
    table = facts.samples({'After': read(tmp_path)})
    assert [(row[0], row[-1]) for row in table.rows[:5]] == [
        ('c', 'best score'),
        ('j', 'widest ±'),
        ('d', 'least likely before'),
        ('f', 'worst score'),
        ('a', ''),
    ]
    assert table.rows[0][1:5] == ('c 0', '1.00e+400 ± 0.10', 'c 10', '1.00e+400 ± 0.10')
    assert table.rows[3][4] == '−∞ ± 0.10' and isinstance(table.rows[0][0], Text)
    assert len(table.rows) == 8 and problems(page_of(tmp_path)) == []


def test_labels_are_counted_as_they_were_used(tmp_path):
    make_folder(tmp_path / 'labels', 4, labellers=2)
    answer_all(tmp_path / 'labels', 'anna', 1)
    folder = LabelFolder(str(tmp_path / 'labels'))
    lines = folder.lines_read()
    answer_all(tmp_path / 'labels', 'bert', 0)  # of which the model knows nothing
    run = write_run(tmp_path / 'run', 'train_reward', labels__source=str(tmp_path / 'labels'))
    counts = {'found': 4, 'learned_from': 3, 'held_out': 1, 'held_out_queries': 1, 'simulated': 4}
    write_learned(run, source=str(tmp_path / 'labels'), **counts, answers=lines)
    found = read(run)
    assert rows_of(facts.counts(found))['Learned from'] == ('3',)
    assert [row[0] for row in facts.labellers(found).rows] == ['anna']
    assert facts.answer(found)[-1] == ('Labels learned from', '3', ['simulated: 4 of 4'])
    assert minds(run)[:2] == [
        '4 labels are simulated: a program answered, not people.',
        '1 held-out queries: a reward model may be right by chance.',
    ]
    shown = facts.examples(found).rows
    assert len(shown) == 8 and [row[2] for row in shown[:4]] == ['', '✓', '', '']
    lowest = folder.questions[min(folder.questions)].tokens()
    assert shown[0][0] == folder.encoding().get_encoder().decode(lowest['query'])


def test_people_who_compared_it_are_its_first_judge(tmp_path):
    run = write_run(tmp_path / 'run')
    folder, policies = tmp_path / 'labels', [str(run)] * 2 + [str(tmp_path / 'other')] * 2
    make_folder(folder, 4, kind=VALIDATION, policies=policies, labellers=2)
    say(folder, 'anna', 3, 2, 0, 3)
    say(folder, 'bot', 0, 0, 0, 0, is_simulated=True)
    write_learned(run, source=str(folder), found=4, answers={})
    judge, *_ = facts.answer(read(run))
    assert judge == ('By people', '1 of 4', ['of the answers prefer it to', 'other'])
    row = rows_of(facts.sure(read(run)))['People prefer it to other']
    assert row == ('1 of 4', '5 % to 70 %', '50 %')
    assert not any('its own reward alone' in warning for warning in minds(run))


def test_numbers_that_an_evaluation_could_not_tell_are_dashes(tmp_path):
    run = write_run(tmp_path / 'run')
    policy = {'kl': 2.0, 'reward': None, 'frontier': None, 'share': None}
    own = {**OWN, 'policy': policy, 'best_of_4': {'kl': 0.6, 'reward': 1.0}}
    judge = {**OWN, 'best_of_4_by_reward_model': {'kl': 0.6, 'reward': 7.0}}
    evaluated(run, rewards={'reward model': own, 'judge': judge})
    rows = rows_of(facts.gain(read(run)))
    assert rows['After'] == ('2.00', '–', '1.50')
    assert rows['Fraction of the possible gain'] == ('', '–', '71 %')
    assert rows['Best of 4, without training'] == ('0.60', '1.00', '7.00')
    assert 'Best of 16, without training' not in rows  # as this evaluation has none


@pytest.mark.parametrize('policy', [{'kl': 1, 'reward': 2, 'share': {}}, [1]])
def test_a_damaged_evaluation_is_said_to_be_one(tmp_path, policy):
    run = write_run(tmp_path / 'run')
    evaluated(run, rewards={'reward model': {**OWN, 'policy': policy}})
    assert f'Cannot be read: {facts.GAIN}. What it says is missing here.' in minds(run)
    assert problems(page_of(run)) == []


@pytest.mark.parametrize(
    'changes',
    [{'experiment': []}, {'digests': {'x': [1]}, 'experiment': {}}, {'labels': {'source': 3}}],
)
def test_a_record_that_was_changed_by_hand_is_no_traceback(tmp_path, changes):
    run = write_run(tmp_path / 'run')
    write_command(run, "./launch.py '", 7)
    record = json.loads((run / 'run.json').read_text())
    record['train_policy'] |= changes
    storage.write_json(str(run / 'run.json'), record)
    assert problems(page_of(run)) == []
    assert f'Cannot be read: {facts.MADE}.' in ' '.join(minds(run))


def test_what_to_mind_of_the_training(tmp_path):
    for place, (tag, last, expected) in enumerate(
        [
            ('objective/kl', 7.0, []),
            ('objective/kl', 4.0, ['KL 4.00, target 6.00.']),
            ('responses/ended', 0.81, []),
            ('responses/ended', 0.79, ['21 % of the last responses']),
        ]
    ):
        run = tmp_path / str(place)
        write_settings(run, 'train_policy', 'test', ranks=1)
        write_curves(run / 'tb/ppo', {tag: [0.1, last]})
        found = [numbers for numbers, _ in facts.mind(read(run))]
        assert found == ['Judged by its own reward alone.', *expected]


def test_a_value_that_is_not_finite_moves_no_other(tmp_path):
    run = write_run(tmp_path)
    write_curves(run / 'tb/ppo', {'objective/entropy': [1.0, math.nan, 3.0]}, begin=5)
    assert read(run).curves['objective/entropy'] == {5: 1.0, 7: 3.0}


def test_a_reward_model_of_another_run_is_told_from_there(tmp_path):
    given = write_run(tmp_path / 'given', 'train_reward')
    rewards = {'rewards__train_new_model': 'off', 'rewards__trained_model': f'{given}/reward_model'}
    run = write_run(tmp_path / 'run', **rewards)
    write_learned(given, source='test', found=1024, learned_from=1000)
    assert rows_of(facts.counts(read(run)))['Learned from'] == ('1,000',)
    assert rows_of(facts.task(read(run)))['Rewarded by'] == ('reward_model',)


def test_a_given_reward_is_named_and_has_no_labels(tmp_path):
    given = {'rewards__train_new_model': 'off', 'rewards__function': '/x/own.py:score'}
    write_settings(tmp_path, 'train_policy', 'test', ranks=1, **given)
    write_events(tmp_path / 'tb/ppo', objective__kl=1.0)
    assert rows_of(facts.task(read(tmp_path)))['Rewarded by the function'] == ('own.py:score',)
    assert facts.UNSEEN not in rows_of(facts.sure(read(tmp_path)))


def test_ratings_have_a_correlation_and_no_chance(tmp_path):
    write_settings(tmp_path, 'train_reward', 'test', ranks=1, labels__type='scalar_rating')
    write_events(tmp_path / 'tb/reward_model', train_reward__held_out__agreement=-1.2)
    expected = ('correlation −0.20', 'none', 'not recorded')
    assert facts.accuracy(read(tmp_path)) == expected


def test_a_chart_has_the_colours_of_the_page_and_no_style_for_all_of_it(tmp_path):
    run = write_run(tmp_path / 'run')
    svg = str(page.training_chart({'run': read(run)}))
    assert svg.startswith('<svg role="img"') and 'var(--accent)' in svg and '#0' not in svg
    assert '<style' not in svg and '<metadata' not in svg and 'dashed: target' in svg
    both = str(page.training_chart({'a $x^2$ <b>': read(run), 'b': read(run)}))
    assert 'a $x^2$ &lt;b&gt;' in both and 'dashed' not in both
    reward_training = read(write_run(tmp_path / 'other', 'train_reward'))
    assert page.training_chart({'other': reward_training}) == ''


def test_a_chart_names_runs_that_end_at_the_same_place(tmp_path):
    """Names at the ends of their lines would cover one another."""
    run = read(write_run(tmp_path / 'run'))
    svg = str(page.training_chart({'_seed': run, 'b\u202e': run, 'c': run}))
    names = re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*> (_seed|b.u202e|c)</text>', svg)
    assert [name for _, _, name in names] == ['_seed', r'b\u202e', 'c']
    assert len({(x, y) for x, y, _ in names}) == 3


def test_a_damaged_run_of_a_policy_is_no_reward_model(tmp_path):
    run = write_run(tmp_path / 'run')
    (run / 'run.json').write_text('{"train_policy": {"ra')
    assert facts.head(read(run))[-1] == 'a policy'
    whole = write_run(tmp_path / 'whole')  # without elapsed/episodes in its curves
    assert facts.head(read(whole))[-1] == 'a policy, not recorded of 6,400 responses'


def test_how_a_run_ended_is_told_by_its_last_training(tmp_path):
    """By the order of the commands, as clocks differ; an evaluation finishes no run."""
    run = write_run(tmp_path / 'run')
    write_command(run, 'a', '2026-01-02T00:00:00Z', '2026-01-02T01:00:00Z', 'interrupted')
    write_command(run, 'b', '2026-01-01T00:00:00Z', '2026-01-01T01:00:00Z')
    assert facts.head(read(run))[1] == 'finished 2026-01-01T01:00:00Z'
    write_command(run, './launch.py train_policy', '2026-01-01T00:00:00Z')
    write_command(run, './launch.py evaluate run', '2026-01-02T00:00:00Z', '2026-01-02T01:00:00Z')
    assert facts.head(read(run))[1].strip() == 'killed'


def test_few_queries_have_no_interval(tmp_path):
    run, folder = write_run(tmp_path / 'run'), tmp_path / 'labels'
    make_folder(folder, 3, labellers=3)
    answers = {name: answer_all(folder, name) for name in ('anna', 'bob', 'carl')}
    write_learned(run, source=str(folder), found=3, answers=answers)
    row = rows_of(facts.sure(read(run)))['Two labellers agree about a question']
    assert row[:2] == ('9 of 9', 'none: too few queries')
