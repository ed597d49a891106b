"""`./launch.py ask` and `labels`, folders as source of labels."""

import itertools
import json
import re

import pytest
import torch
from command_line import error_of, invoke, succeed
from label_folders import TASK, make_folder, random_questions, say
from sample_files import label_hparams

import launch
from lm_human_preferences.commands import ask as asking
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import reward_on_labels
from lm_human_preferences.hparams.reward_options import LabelHParams
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.agreement import wilson_interval
from lm_human_preferences.labels.folder import EVERYBODY, LabelFolder
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.rewards import TrainedRewardModel
from lm_human_preferences.runs import run_settings


def ask(path, options='', experiment='test'):
    return succeed(f'ask {experiment} {path} {options}').stdout


def command_to_train(path, labels):
    return training_command(LabelFolder(str(path)), launch.settings_of_experiments(), labels)


def questions_of(path):
    return list(LabelFolder(str(path)).questions.values())


def test_a_chat_shows_four_answers_to_choose_from(tmp_path, started):
    """A folder keeps its type; a file of questions, and the user, say how many there are."""
    make_folder(tmp_path / 'made', task={'label_type': 'best_of_2'}, samples=2)
    task = '--task.policy.initial_model reviews --task.query_dataset test'
    for more, path in (
        ('', 'new'),
        ('--questions pairs.jsonl', 'new'),
        ('--labels.type scalar_rating', 'new'),
        ('', 'made'),
    ):
        ask(tmp_path / path, f'{task} {more}', 'chat')
    types = [arguments['reward_hparams'].labels.type for _, arguments, _ in started]
    assert types == ['best_of_4', 'best_of_2', 'scalar_rating', 'best_of_2']


def test_more_questions_go_on_in_the_data_set_and_none_comes_twice(tmp_path):
    texts = tmp_path / 'texts.jsonl'
    texts.write_text('\n'.join(json.dumps(letter * 3) for letter in 'abcdefghijkl'))
    (tmp_path / 'texts.test.jsonl').write_text('"xyz"')
    for _ in range(3):
        ask(tmp_path / 'f', f'--count 4 --batch_size 3 --task.query_dataset {texts}')
    questions = questions_of(tmp_path / 'f')
    queries = {tuple(question.tokens()['query']) for question in questions}
    assert len(questions) == 12 and queries == {(letter,) * 3 for letter in range(12)}
    assert [question.texts_read for question in questions] == list(range(1, 13))


def test_equal_samples_are_not_asked_and_are_counted(tmp_path):
    """At a temperature near 0 every sample is the most likely one."""
    printed = ask(tmp_path / 'f', '--count 5 --batch_size 4 --task.policy.temperature 1e-8')
    assert '0 questions added, 0 in all' in printed
    assert '80 questions whose samples are all equal were not asked' in printed


def test_queries_to_be_learned_from_are_of_the_training_part(tmp_path, monkeypatch):
    (tmp_path / 'x.jsonl').write_text('"abc"\n')
    (tmp_path / 'x.test.jsonl').write_text('"xyz"\n')
    load = asking._load_policy
    monkeypatch.setattr(asking, '_load_policy', lambda name, task, *more: load('initial', task))
    options = f'--count 3 --task.query_dataset {tmp_path}/x.jsonl'
    for more, text, part in (('', 'abc', 'training'), ('--against run', 'xyz', 'test')):
        printed = ask(tmp_path / part, f'{options} {more}')
        assert f', the {part} split: 1 of 1 texts are used' in printed
        questions = questions_of(tmp_path / part)
        queries = {tuple(question.tokens()['query']) for question in questions}
        assert queries == {tuple(encodings.Test.get_encoder().encode(text))}


def test_ask_names_the_next_command(tmp_path):
    folder = tmp_path / "anna's"
    result = invoke(['ask', 'test', str(folder), '--count=1'])
    command = f"./launch.py label '{tmp_path}/anna'\"'\"'s' --labeller NAME"
    assert f'\nTo answer them: {command}\n' in result.stdout
    assert result.stdout.endswith(f'To train on the answers: {command_to_train(folder, 1)}\n')


def test_the_share_holds_over_all_calls(tmp_path):
    """Five calls of four questions at .2; gold questions in between do not count."""
    record = '{"query": "abc", "sample0": "a", "sample1": "b", "best": 1}\n'
    (tmp_path / 'gold.jsonl').write_text(record)
    options = '--labels.type best_of_2 --repeated 0.2 --labellers 3'
    for call in range(5):
        ask(tmp_path / 'f', f'--count 4 {options}')
        if call == 2:
            ask(tmp_path / 'f', f'--labels.type best_of_2 --gold {tmp_path}/gold.jsonl')
    wanted = [question.labellers for question in questions_of(tmp_path / 'f')]
    assert (wanted.count(3), wanted.count(1), wanted.count(EVERYBODY)) == (4, 16, 1)


def test_instructions_are_kept(tmp_path):
    (tmp_path / 'i.txt').write_text('Be kind.\n')
    ask(tmp_path / 'f', f'--count 2 --instructions {tmp_path}/i.txt')
    assert LabelFolder(str(tmp_path / 'f')).task['instructions'] == 'Be kind.'
    (tmp_path / 'i.txt').write_text('Be honest.\n')
    error = error_of(invoke(f'ask test {tmp_path}/f --instructions {tmp_path}/i.txt'))
    assert 'already gives people other instructions' in error


def test_mistakes_of_ask_are_one_line(tmp_path):
    def error(line):
        return error_of(invoke(f'ask {line}'))

    assert '--policy or --against' in error(f'test {tmp_path}/f --policy {tmp_path}/none')
    assert 'cannot share equally' in error(
        f'test {tmp_path}/f --against {tmp_path}/x --labels.type scalar_rating'
    )
    assert not (tmp_path / 'f').exists()
    assert 'give a local directory' in error('test az://account/container/f')
    assert 'name another policy' in error(f'test {tmp_path}/f --policy run --against run/')
    told = error(f'test {tmp_path}/f --judge mock')
    assert told == '--judge and --rewards.function need --best_of N'
    assert error(f'test {tmp_path}/f --best_of 2') == (
        'a model that no run trained has no reward: give --judge REWARD'
    )
    (tmp_path / 'notes.txt').write_text('x')
    assert 'is neither empty nor a folder of labels' in error(f'test {tmp_path}')


@pytest.fixture
def answered(tmp_path):
    """Four questions for several; anna, bob and carl agree in 3 of 5 pairs."""
    path = tmp_path / 'f'
    make_folder(path, 4, labellers=3)
    say(path, 'anna', 1, 2, 0, None)
    say(path, 'bob', 1, 2, 3, None)
    say(path, 'carl', 1)
    return path


def report_of(path, tmp_path, options=''):
    file = tmp_path / 'report.json'
    result = succeed(f'labels {path} --output {file} {options}')
    report = json.loads(file.read_text())
    file.unlink()
    return report, result.stdout


def test_report_by_hand(answered, tmp_path):
    """Pairs: question 0 three of three equal, 1 one of one, 2 none of one."""
    report, printed = report_of(answered, tmp_path)
    assert report['questions'] == {'all': 4, 'answered': 3, 'retired': 1}
    assert report['training_labels'] == 7
    assert '4 questions, 3 answered, 1 retired (skipped by two labellers)' in printed
    agreement = report['agreement']
    assert (agreement['pairs'], agreement['raw'], agreement['chance']) == (5, 4 / 5, 1 / 4)
    # 3 of 3, 1 of 1 and 0 of 1: the answers are about too few queries.
    assert (agreement['low'], agreement['high']) == (0, 1)
    row = r'agreement, 5 pairs of answers to 3 questions +80.0 % +no interval: ask about at least'
    row += r' 10 queries, of similar weight +25.0 %\n'
    assert re.search(row + r"Krippendorff's alpha +0\.\d{3}\n", printed)
    # In four orders: n 28, 7 of each value. Unequal ordered pairs over (values - 1): 8
    assert agreement['alpha'] == pytest.approx(1 - 27 * 8 / (28**2 - 4 * 7**2))
    question = list(LabelFolder(str(answered)).questions)[2]
    assert report['disagreements'] == {question: {'anna': 0, 'bob': 3}}
    assert f'FILE has all:\n  {question[:8]}: anna 0, bob 3' in printed
    assert report_of(answered, tmp_path, '--without bob')[0]['disagreements'] == {}
    anna = report['labellers']['anna']
    assert (anna['answers'], anna['skipped'], anna['median s']) == (3, 1, 1.5)
    assert anna['agreement'] == '3 of 4'
    *_, last = printed.splitlines()
    assert last == f'To train on them: {command_to_train(answered, 7)}'


def test_gold_questions_are_no_part_of_the_agreement_and_measure_no_reward_model(answered, run):
    make_folder(answered, 3, seed=9, kind='gold', labellers=EVERYBODY, gold=2)
    for name in ('anna', 'bob', 'carl'):
        say(answered, name, *[...] * 4, 2, 2, 2)
    with_gold = LabelFolder(str(answered))
    assert reward_on_labels.report(with_gold, str(run))['trained_on']['labels'] == 7
    without = reward_on_labels.report(with_gold, str(run), ['anna'])
    assert without['trained_on']['labels'] == 4
    found = report(with_gold)
    assert (found['agreement']['questions'], found['agreement']['raw']) == (3, 4 / 5)
    assert found['labellers']['anna']['gold'] == '3 of 3'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder that is taken for the run of a reward model."""
    model = TrainedRewardModel('test', encodings.Test)
    monkeypatch.setattr(loading, 'load_learned', lambda *arguments: model)
    (tmp_path / 'run').mkdir()
    return tmp_path / 'run'


def test_what_a_reward_model_has_learned_is_no_test_of_it(answered, run, tmp_path, monkeypatch):
    def read_settings(hparams, directory):
        hparams.labels = LabelHParams(source=str(answered), type='best_of_4', held_out=0.5)
        return hparams

    monkeypatch.setattr(run_settings, 'read_settings', read_settings)
    report, printed = report_of(answered, tmp_path, f'--reward {run}')
    learned = report['reward']['trained_on']
    assert (learned['is_learned'], learned['low'], learned['high']) == (True, None, None)
    line = r'others: as the labeller in [\d.]+ % of \d labels, which it may have learned'
    assert re.search(line, printed)
    tested = report['reward']['held_out']
    assert not tested['is_learned'] and tested['low'] < tested['high']
    constant = 'def score(queries, responses):\n    return [1.0] * len(queries)\n'
    (tmp_path / 'const.py').write_text(constant)
    _, printed = report_of(answered, tmp_path, f'--reward {tmp_path}/const.py:score')
    assert 'others: as the labeller in 25.0 % of 7 labels (no interval' in printed


def test_a_reward_model_whose_context_is_too_small_is_named(tmp_path, run):
    folder = make_folder(tmp_path / 'f', task={'task': {**TASK['task'], 'query_length': 8}})
    say(tmp_path / 'f', 'anna', 1)
    with pytest.raises(UserError, match=rf"^--reward {run}: \d+ tokens are more than the model's"):
        reward_on_labels.report(LabelFolder(folder.path), str(run))


def test_win_rate(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 10, kind='validation', policies=['initial', 'initial', 'run', 'run'])
    say(path, 'anna', 0, 1, 2, 3, 3, 2, 2, 3, 2, 3)
    report, printed = report_of(path, tmp_path)
    (comparison,) = report['comparisons']
    assert (comparison['policy'], comparison['against']) == ('initial', 'run')
    assert (comparison['n'], comparison['wins_of_against']) == (10, 8)
    # scipy.stats.binomtest(8, 10).proportion_ci(0.95, 'wilson') of SciPy 1.17.1
    assert [round(comparison[key], 4) for key in ('low', 'high')] == [0.4902, 0.9433]
    assert re.search('run preferred to initial, 0 ties left out +8 of 10 +95 % int', printed)
    assert report['training_labels'] == 0


def test_answers_about_one_query_are_together(tmp_path):
    """Ten queries with ten questions each, whose answers are equal: as ten answers."""
    path = tmp_path / 'f'
    new = list(itertools.islice(random_questions(samples=2), 100))
    for number, tokens in enumerate(new):
        tokens['query'] = [number // 10] * 3
    task, policies = {'label_type': 'best_of_2'}, ['initial', 'run']
    make_folder(path, 100, task=task, new=new, kind='validation', policies=policies)
    say(path, 'anna', *[1] * 70, *[0] * 30)
    (comparison,) = report_of(path, tmp_path)[0]['comparisons']
    ends = comparison['low'], comparison['high']
    assert ends == pytest.approx(wilson_interval(7, 10), abs=0.01)


def test_the_best_of_several_answers_is_compared_with_one(tmp_path):
    """By a reward that likes the letter a: the initial model against the best of 16 of it."""
    (tmp_path / 'a.py').write_text(
        'def score(queries, responses):\n    return [text.count("a") for text in responses]\n'
    )
    options = '--count 20 --labels.type best_of_2 --against initial --batch_size 20'
    ask(tmp_path / 'f', f'{options} --best_of 16 --judge {tmp_path}/a.py:score')
    questions = questions_of(tmp_path / 'f')
    best = f'best of 16 of initial by {tmp_path}/a.py:score'
    assert all(question.policies == [best, 'initial'] for question in questions)
    letter = encodings.Test.get_encoder().encode('a')[0]
    tokens = [question.tokens() for question in questions]
    counts = [sum(each[f'sample{i}'].count(letter) for each in tokens) for i in range(2)]
    assert counts[0] > 12 > 2 * counts[1]


def test_a_policy_is_its_resolved_path_and_its_weights(tmp_path, monkeypatch):
    """A run that was trained again is another policy; another spelling of its path is none."""
    load, seeds = asking._load_policy, {'initial': 0, 'run': 1}

    def _load(name, task, *more):
        torch.manual_seed(seeds['initial' if name == 'initial' else 'run'])
        return load('initial', task)

    monkeypatch.setattr(asking, '_load_policy', _load)
    (tmp_path / 'save').mkdir()
    monkeypatch.chdir(tmp_path / 'save')
    options = '--count 4 --labels.type best_of_2'
    for number, path in enumerate(['p1', 'p1/', '../save/p1', f'{tmp_path}/save/p1']):
        ask('f', f'{options} --seed {number} --against {path}')
    run = f'{tmp_path}/save/p1'
    questions = questions_of('f')
    assert all(question.policies == ['initial', run] for question in questions)
    seeds['run'] = 2  # trained again with --overwrite
    ask('f', f'{options} --against p1')
    say('f', 'anna', *[1] * 16, *[0] * 4)
    report, _ = report_of('f', tmp_path)
    digests = list(dict.fromkeys(question.weights[1] for question in questions_of('f')))
    keys = ('policy', 'against', 'wins_of_against', 'n')
    rows = [tuple(row[key] for key in keys) for row in report['comparisons']]
    names = [f'{run} (weights {digest[:8]})' for digest in digests]
    assert rows == [('initial', names[0], 16, 16), ('initial', names[1], 0, 4)]


def test_training_takes_from_a_folder_what_is_exported_from_it(answered, tmp_path):
    file = tmp_path / 'labels.json'
    succeed(f'labels {answered} --export {file} --without bob,carl')
    settings = {'labels.type': 'best_of_4', 'batch_size': 1, 'task.response_length': 4}
    from_file, *_ = training_data.load_labels(label_hparams(file, **settings), encodings.Test)
    hparams = label_hparams(answered, **settings, **{'labels.without': 'bob,carl'})
    from_folder, *_ = training_data.load_labels(hparams, encodings.Test)
    for field, values in from_file.items():
        assert values.tolist() == from_folder[field].tolist()
    assert from_file['best'].tolist() == [1, 2, 0]
