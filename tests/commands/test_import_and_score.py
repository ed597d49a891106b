"""`./launch.py import_labels` and `score`, `ask` with own questions, labels as texts."""

import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from command_line import error_of, invoke, succeed
from experiments import resolved
from label_folders import make_folder
from sample_files import write_lines

from lm_human_preferences.commands.texts import score
from lm_human_preferences.datasets.reviews import queries
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.texts import records, tokenise
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.runs.run_settings import reward_settings_of

GOOD, BAD = ('good', 'great', 'funny', 'clever'), ('bad', 'dull', 'awful', 'stale')


def preferences(count, seed=0):
    rng = random.Random(seed)
    beginnings = queries()
    return [
        {
            'prompt': rng.choice(beginnings),
            'chosen': f'{rng.choice(GOOD)} {rng.choice(["indeed", "throughout", "today"])}',
            'rejected': f'{rng.choice(BAD)} {rng.choice(["indeed", "throughout", "today"])}',
        }
        for _ in range(count)
    ]


@pytest.fixture(scope='module')
def reward_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp('reward')
    pairs = write_lines(directory / 'pairs.jsonl', preferences(300))
    result = succeed(
        f'train_reward mock_sentiment pairs --mpi 1 --save_dir {directory} --labels.source {pairs}'
        ' --labels.type best_of_2 --labels.num_train None --labels.held_out 0.1'
        ' --normalize_samples 64'
    )
    return directory / 'pairs', result.stdout


def test_preferences_train_a_reward_model_by_one_command(reward_model):
    run, printed = reward_model
    assert 'Num labels found in source: 300' in printed
    (percent,) = re.findall(r'^held out: as the labeller in (\S+)', printed, re.MULTILINE)
    assert float(percent) > 90


def test_scores(reward_model, tmp_path, monkeypatch):
    query = 'the film was'
    file = write_lines(
        tmp_path / 'texts.jsonl',
        [
            {'query': query, 'response': 'very good', 'more': 1},
            {'query': query, 'completion': 'dull'},
            {'prompt': query, 'chosen': 'great', 'rejected': 'awful indeed'},
            {'query': query, 'sample0': 'great', 'sample1': '', 'sample2': 'very good'},
        ],
    )
    command = f'score {reward_model[0]} {file}'
    results = []
    for size in (2, 64):
        monkeypatch.setattr(score, 'BATCH', size)
        results.append(succeed(command).stdout)
    first, second = ([json.loads(line) for line in lines.splitlines()] for lines in results)
    for lines in (first, second):
        assert lines[0].pop('more') == 1  # as any other field
    names = [' '.join(found) for found in first]
    assert names == ['score', 'score', 'chosen rejected', 'sample0 sample1 sample2']
    model = loading.load_saved(loading.saved_model(str(reward_model[0])))
    task = reward_settings_of(str(reward_model[0])).task
    tokeniser = tokenise.Tokeniser(encodings.Reviews, task, 'refuse', '--too_long')
    label = records.TextLabel(query, ('very good', 'dull', 'great', 'awful indeed', ''), None)
    tokens = tokeniser.question(label, list('abcde'), 'here')
    queries = torch.tensor([tokens['query']])
    expected = {
        text: model.score(queries, torch.tensor([tokens[name]])).item()
        for name, text in zip('abcde', label.samples, strict=True)
    }
    scored = ('very good', 'dull', 'great', 'awful indeed', 'great', '', 'very good')
    for found in (first, second):
        scores = [score for line in found for score in line.values()]
        assert scores == pytest.approx([expected[text] for text in scored], abs=1e-5)
    assert expected['great'] > expected['dull']
    assert succeed(f'score {reward_model[0]}/reward_model {file}').stdout == results[1]
    # A pipe, with a byte order mark
    before = os.dup(0)
    reading, writing = os.pipe()
    with open(writing, 'w', encoding='utf-8-sig') as pipe:
        pipe.write(Path(file).read_text())
    os.dup2(reading, 0)
    os.close(reading)
    try:
        assert succeed(f'score {reward_model[0]} -').stdout == results[1]
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_texts_that_do_not_fit_are_scored_as_told(reward_model, tmp_path):
    file = write_lines(
        tmp_path / 'texts.jsonl',
        [
            {'query': 'the film was', 'response': 'good and never dull'},
            {'query': 'i thought overall the whole film was', 'response': 'good'},
            {'query': 'the film was', 'response': 'good'},
        ],
    )
    error = error_of(invoke(f'score {reward_model[0]} {file}'))
    assert 'line 1: a response has 4 tokens, more than 3; give --too_long ' in error
    skipped = succeed(f'score {reward_model[0]} {file} --too_long skip')
    scores = [json.loads(line)['score'] for line in skipped.stdout.splitlines()]
    assert scores[:2] == [None, None] and scores[2] is not None
    assert 'note: Skipped: 2 records with longer texts' in skipped.stderr


def test_the_run_of_a_policy_knows_the_lengths_of_texts(tmp_path):
    from_elsewhere = {'rewards.train_new_model': 'off', 'rewards.trained_model': 'x'}
    online = {'rewards.train_new_model.labels.held_out': 0.25}
    for overrides, held_out in ((from_elsewhere, 0), (online, 0.25)):
        policy = resolved('train_policy', 'mock_sentiment', overrides)
        text = json.dumps(policy.to_nested_dict())
        (tmp_path / 'train_policy_hparams.json').write_text(text)
        record = reward_settings_of(f'{tmp_path}/policy')
        assert (record.task.response_length, record.labels.held_out) == (3, held_out)


def test_mistakes_of_score_are_one_line(reward_model, tmp_path):
    path, run = write_lines(tmp_path / 't.jsonl', [{'query': 'the film was'}]), reward_model[0]
    assert 'line 1 has nothing to score' in error_of(invoke(f'score {run} {path}'))
    write_lines(path, [{'query': 'the film was', 'response': 'good'}])
    assert 'hparams.json, nor does its reward_model/' in error_of(
        invoke(f'score {tmp_path} {path}')
    )
    write_lines(path, [{'prompt': 'a', 'chosen': 'b', 'annotations': []}])
    assert "'chosen' and 'rejected' must both be texts" in error_of(invoke(f'score {run} {path}'))
    assert 't.jsonx' in error_of(invoke(f'score {run} {tmp_path}/t.jsonx'))


def test_mistakes_of_import_are_one_line(tmp_path):
    pairs = write_lines(tmp_path / 'pairs.jsonl', preferences(2))

    def error(more, output='f', file=pairs):
        return error_of(invoke(f'import_labels mock_sentiment {file} {tmp_path}/{output} {more}'))

    assert 'its label type is best_of_2, not best_of_4' in error('')
    assert '--labeller' in error('--labels.type best_of_2 --labeller a/b')
    assert 'is neither empty nor a folder of labels' in error('--labels.type best_of_2', output='')
    assert 'none.jsonl' in error('--labels.type best_of_2', file=tmp_path / 'none.jsonl')
    (tmp_path / 'empty.json').write_text('[]')
    assert 'holds no label' in error('--labels.type best_of_2', file=tmp_path / 'empty.json')
    assert not (tmp_path / 'f').exists()


def test_labels_are_imported_without_a_data_set_of_queries(tmp_path):
    pairs = write_lines(tmp_path / 'pairs.jsonl', [{'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}])
    for added in (1, 0):  # the folder is there, too
        result = succeed(
            f'import_labels chat {pairs} {tmp_path}/f --task.policy.initial_model test'
            ' --task.policy.lora off --task.chat off --labels.too_long cut'
        )
        assert f'{added} questions added, 1 in all' in result.stdout
        assert ' --task.query_dataset QUERIES.jsonl ' in result.stdout


def test_report_with_a_reward_model(reward_model, tmp_path):
    """What its training held out is told from the rest by the queries alone."""
    pairs = write_lines(tmp_path / 'pairs.jsonl', preferences(300))
    succeed(f'import_labels mock_sentiment {pairs} {tmp_path}/f --labels.type best_of_2')
    succeed(f'labels {tmp_path}/f --reward {reward_model[0]} --output {tmp_path}/report.json')
    report = json.loads((tmp_path / 'report.json').read_text())
    imported = report['labellers']['imported']  # whom nobody saw on a screen of ours
    assert (imported['positions'], imported['median s']) == (None, None)
    reward = report['reward']
    assert reward['held_out_share'] == 0.1 and reward['comparisons'] is None
    held_out, others = reward['held_out']['labels'], reward['trained_on']['labels']
    assert 10 < held_out < 100 < held_out + others == report['training_labels']
    assert min(reward[part]['accuracy'] for part in ('held_out', 'trained_on')) > 0.9


def test_mistakes_of_the_report_are_one_line(reward_model, tmp_path):
    pairs = write_lines(tmp_path / 'pairs.jsonl', preferences(2))
    succeed(f'import_labels mock_sentiment {pairs} {tmp_path}/f --labels.type best_of_2')

    def error(more):
        return error_of(invoke(f'labels {tmp_path}/f {more}'))

    assert error(f'--reward {tmp_path}#good').startswith(f'--reward good: {tmp_path} is no')
    make_folder(tmp_path / 'letters', 2)
    words = f'labels {tmp_path}/letters --reward {reward_model[0]}'
    assert "has the encoding 'reviews', not 'test'" in error_of(invoke(words))


def test_questions_of_ones_own_and_gold_ones(tmp_path):
    own = write_lines(
        tmp_path / 'own.jsonl',
        [
            {'query': 'the film was', 'sample0': 'good', 'sample1': 'bad'},
            {'query': 'the plot was', 'sample0': 'good', 'sample1': 'good'},
            {'prompt': 'the plot was', 'chosen': 'good', 'rejected': 'dull'},
            {'query': 'the film was', 'sample0': 'bad', 'sample1': 'good'},  # the first again
        ],
    )
    words = f'ask mock_sentiment {tmp_path}/f --labels.type best_of_2'
    printed = succeed(f'{words} --questions {own} --repeated 0.5 --labellers 2').stdout
    assert '2 questions added, 2 in all' in printed
    assert '1 questions whose samples are all equal were not asked' in printed
    assert '1 questions that are there already were not asked again' in printed
    again = succeed(f'{words} --questions {own} --labels.too_long cut').stdout
    assert '3 questions that are there already' in again
    gold = write_lines(tmp_path / 'gold.jsonl', preferences(4))
    succeed(f'{words} --gold {gold}')
    folder = LabelFolder(str(tmp_path / 'f'))
    questions = list(folder.questions.values())
    assert [each.kind for each in questions[:2]] == ['train'] * 2
    assert [each.labellers for each in questions[:2]] == [1, 2]
    assert questions[0].policies == ['own.jsonl', 'own.jsonl'] and questions[0].gold is None
    assert {question.kind for question in questions[2:]} == {'gold'}


def test_mistakes_of_questions_are_one_line(tmp_path):
    own = write_lines(tmp_path / 'own.jsonl', [{'query': 'a', 'sample0': 'good', 'sample1': 'bad'}])
    words = f'ask mock_sentiment {tmp_path}/f --labels.type best_of_2'
    assert f'--questions {own}, line 1 cannot be read as text: encoding' in error_of(
        invoke(f'{words} --questions {own}')
    )
    assert f'--gold {own}, line 1' in error_of(invoke(f'{words} --gold {own}'))
    both = error_of(invoke(f'{words} --gold {own} --questions {own}'))
    assert '--questions and --gold ask different questions' in both
    told = error_of(invoke(f'{words} --questions {own} --against {tmp_path}'))
    assert '--questions and --against' in told
    unused = invoke(f'{words} --questions {own} --policy {tmp_path}')
    assert '--questions needs no samples: leave out --policy' in error_of(unused)
    unused = invoke(f'{words} --gold {own} --repeated 0.5')
    assert 'everybody is asked --gold: leave out --repeated' in error_of(unused)
