"""--dry_run: checks that need no work; nothing is started, fetched or written."""

import json
import re

import pytest
from command_line import invoke, last_error_of, succeed

from lm_human_preferences import storage
from lm_human_preferences.datasets.reviews import WORDS
from lm_human_preferences.machine import hardware

NEW = '--rewards.train_new_model'


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr(storage.blobs, '_connected', lambda path: pytest.fail('a server is asked'))
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    yield
    assert not (tmp_path / 'cache').exists()


def told(words, tmp_path):
    result = succeed(f'{words} --dry_run --save_dir {tmp_path}')
    assert not list(tmp_path.iterdir())
    return result.stderr.splitlines()


@pytest.mark.parametrize(
    'command, ranks, precision, phases',
    [
        ('train_policy', 1, 'fp32', 'reward model, then policy, then evaluation'),
        ('train_reward', 2, 'bf16', 'reward model'),
    ],
)
def test_what_would_start(command, ranks, precision, phases, tmp_path):
    words = f'{command} mock_sentiment first --mpi {ranks} --run.precision {precision}'
    lines = told(words, tmp_path)
    assert lines[:3] == [
        f'would start {ranks} rank(s), each on a CPU, {precision}',
        f'would write to {tmp_path}/first',
        f'phases: {phases}',
    ]
    assert lines[3].startswith('training takes about 0.')
    assert re.fullmatch(r"first query: '\w+( \w+)+'", lines[4])


def test_what_is_remote_is_not_checked_and_named(tmp_path):
    *_, last = told('train_policy descriptiveness first --mpi 1', tmp_path)
    assert last.startswith('not checked, because it is not on this machine: the encoding main, ')
    assert f', --task.query_dataset books, {NEW}.labels.source https://openaipublic.blob' in last


def test_sizes_of_released_models_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, 'available_memory', lambda: 20 << 30)
    lines = told('train_policy sentiment first --mpi 1 --task.policy.initial_model 774M', tmp_path)
    warnings = [line for line in lines if line.startswith('WARNING: training takes about ')]
    assert warnings and 'a smaller micro_batch_size' in warnings[-1]


def test_a_kl_that_costs_nothing_runs_and_is_noted(tmp_path):
    words = 'train_policy test first --rewards.kl_coef 0'
    note = 'note: --rewards.kl_coef 0.0 stays 0 however it adapts: the KL costs nothing'
    assert note in told(f'{words} --rewards.adaptive_kl.horizon 1', tmp_path)
    assert note not in told(f'{words} --rewards.adaptive_kl off', tmp_path)


def write_labels(path, **changes):
    label = {'query': [1, 2, 3], **{f'sample{i}': [i] * 4 for i in range(4)}, 'best': 2, **changes}
    path.write_text(json.dumps([label] * 64))
    return path


def test_labels_are_checked(tmp_path):
    folder = tmp_path / 'labels'
    folder.mkdir()
    good, bad = write_labels(folder / 'good.json'), write_labels(folder / 'bad.json', best=4)
    words = (
        f'train_reward test first --dry_run --save_dir {tmp_path}/runs --labels.num_train 64'
        ' --labels.source'
    )
    said = succeed(f'{words} {good}').stderr
    assert "first label: query 'bcd', sample0 'aaaa', sample1 'bbbb', " in said
    assert ', best 2\n' in said
    expected = "label 0, field 'best' must be a whole number from 0 to 3"
    assert expected in last_error_of(invoke(f'{words} {bad}'))
    assert 'no such file' in last_error_of(invoke(f'{words} {folder}/missing.json'))
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize(
    'words, message',
    [
        ('--task.query_dataset {}/missing.jsonl', '{}/missing.jsonl: no such file'),
        ('--task.policy.initial_model nosuch', "unknown model 'nosuch'"),
        ('--run.precision tf32', 'tf32 needs a GPU'),
        (f'{NEW} off --rewards.trained_model mock', "('mock') judges film reviews only"),
        (f'{NEW}.labels.source mock', 'or train with --task.policy.initial_model reviews'),
    ],
)
def test_what_would_fail(words, message, tmp_path):
    command = f'train_policy test first --dry_run --save_dir {tmp_path}/runs {words}'
    found = last_error_of(invoke(command.format(tmp_path)))
    assert message.format(tmp_path) in found
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize(
    'words, range_',
    [
        ('--ppo.gamma 5', 'at most 1'),
        ('--task.truncate_token 999999', '0 to 26'),
        ('--task.truncate_after 4 --task.truncate_token 5', 'below --task.response_length 4'),
        ('--task.response_length 600', 'are 603, more than the 8 of --task.policy.initial_model'),
        ('--ppo.batch_size 1_000_000_000_000 --ppo.total_episodes 1_000_000_000_000', 'at most'),
    ],
)
def test_values_that_cannot_work_are_refused_and_nothing_is_written(words, range_, tmp_path):
    for more in ('', '--dry_run'):
        command = f'train_policy test first --mpi 1 --save_dir {tmp_path} {words} {more}'
        found = last_error_of(invoke(command))
        assert words.split()[0].strip('-') in found and range_ in found
        assert not list(tmp_path.iterdir())


def test_queries_to_evaluate_on_are_there(tmp_path):
    queries = tmp_path / 'queries.jsonl'
    queries.write_text(json.dumps(f'{WORDS[0]} was'))
    (tmp_path / 'queries.test.jsonl').write_text(json.dumps('nothing'))
    words = f'train_policy mock_sentiment run --save_dir {tmp_path}/runs --dry_run {NEW} off'
    words += f' --rewards.trained_model mock --task.query_dataset {queries}'
    assert "has no word 'nothing'" in last_error_of(invoke(words))
    succeed(f'{words} --run.evaluate off')


def test_a_run_that_is_there_already(tmp_path):
    words = f'train_reward test first --save_dir {tmp_path} --labels.num_train 64 --mpi 1'
    succeed(words)
    assert f'{tmp_path}/first holds a run already' in last_error_of(invoke(f'{words} --dry_run'))
    succeed(f'{words} --dry_run --overwrite')
    succeed(f'{words} --dry_run --run.resume on')
    changed = f'{words} --dry_run --run.resume on --micro_batch_size 4'
    assert 'note: going on with --micro_batch_size 4' in invoke(changed).stderr
    assert (tmp_path / 'first/reward_model/checkpoints/model.ckpt.index').exists()
