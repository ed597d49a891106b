"""Both trainings and sampling by command line, from TensorFlow's files and from ours."""

import json
import re

import numpy as np
import pytest
from command_line import error_of, flat, invoke, succeed
from console import printed, responses
from golden_data import found, require, require_bpe
from trainers import files_in

import sample
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

SAVED_RUNS = [path.split('/')[0] for path in found('*/policy/checkpoints/checkpoint')]


@pytest.fixture
def passages(tmp_path):
    path = tmp_path / 'passages.jsonl'
    texts = [f'. it was {word} and then it rained. ' for word in ('a', 'b', 'c', 'd') * 9]
    path.write_text('\n'.join(map(json.dumps, texts)))
    return path


@pytest.mark.parametrize('name', SAVED_RUNS)
def test_train_policy_on_a_recorded_reward_model(name, tmp_path, passages, monkeypatch):
    directory = require(name)
    hparams = json.loads(require(name, 'train_policy_hparams.json').read_text())
    if hparams['task']['query_dataset'] == 'books':
        hparams['task']['query_dataset'] = passages
        monkeypatch.setenv('LMHP_GPT2_ENCODINGS', str(require_bpe()))
    ppo = {**hparams['ppo'], 'total_episodes': 2 * hparams['ppo']['batch_size']}
    given = flat({'task': hparams['task'], 'ppo': ppo, 'run': {'log_interval': 1}})
    given |= {'task.policy.initial_model': directory / 'policy', 'run.console': 'original'}
    words = [f'--{key}={value}' for key, value in given.items()]
    words += ['--rewards.train_new_model=off', f'--rewards.trained_model={directory}']
    result = succeed(['train_policy', 'test', 'mine', '--mpi=1', f'--save_dir={tmp_path}', *words])
    assert len(printed('objective/score', result.stdout)) == 2
    assert [line for line in result.stdout.splitlines() if line.startswith('setting reward_model/')]
    saved = checkpoints.latest(str(tmp_path / 'mine' / 'policy' / 'checkpoints'))
    assert saved.endswith('model.ckpt-2') and Bundle(saved)['global_step'] == 2
    recorded = Bundle(checkpoints.latest(str(directory / 'policy' / 'checkpoints')))
    assert list(Bundle(saved)) == list(recorded)
    for variable in recorded:
        if variable.startswith('reward_model/'):
            np.testing.assert_array_equal(Bundle(saved)[variable], recorded[variable])


def test_queries_of_the_reward_models_labels_stand_in_for_lost_books(tmp_path, monkeypatch):
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'cache'))
    labels = tmp_path / 'labels.json'
    answers = {'sample0': [1] * 4, 'sample1': [2] * 4}
    each = [{'query': [i % 5, 26, 27], **answers, 'best': i % 2} for i in range(64)]
    labels.write_text(json.dumps(each))
    books = f'--mpi 1 --save_dir {tmp_path} --task.query_dataset books --task.end_text .'
    succeed(
        f'train_reward test reward {books} --labels.source {labels} --labels.type best_of_2 '
        '--labels.num_train 64 --normalize_samples 8'
    )
    succeed(
        f'train_policy test policy {books} --rewards.train_new_model off'
        f' --rewards.trained_model {tmp_path}/reward --ppo.total_episodes 64'
    )
    sampled = succeed(f'sample --save_dir {tmp_path}/policy --nsamples 8 --mpi 1', sample.cli)
    queries = {query for query, _ in responses(sampled.stdout)}
    assert queries == {f'{letter}.<unk>' for letter in 'abcde'}


def test_the_embedded_experiment_and_samples_of_it(tmp_path):
    result = succeed(
        f'train_policy test first --mpi 1 --save_dir {tmp_path} --run.console original'
        ' --ppo.total_episodes 3200 --run.save_interval 25'
    )
    scores = printed('objective/score', result.stdout)
    assert np.mean(scores[-3:]) > scores[0] + 1
    parts = ('data-00000-of-00001', 'index', 'resume.json')
    steps = [f'policy/checkpoints/model.ckpt-{step}.{part}' for step in (25, 50) for part in parts]
    files = files_in(tmp_path / 'first').keys() - {'run.json'}
    assert sorted(re.sub(r'(tfevents)\..*', r'\1', name) for name in files) == [
        'policy/checkpoints/checkpoint',
        *steps,
        'policy/encoding',
        'policy/hparams.json',
        'reward_model/checkpoints/checkpoint',
        *(f'reward_model/checkpoints/model.ckpt.{part}' for part in parts[:2]),
        'reward_model/encoding',
        'reward_model/hparams.json',
        'samples.jsonl',
        'tb/ppo/events.out.tfevents',
        'tb/reward_model/events.out.tfevents',
        'train_policy_hparams.json',
        'train_reward_hparams.json',
    ]
    sampled = succeed(f'sample --save_dir {tmp_path}/first --nsamples 8 --mpi 1', sample.cli)
    assert len(responses(sampled.stdout)) == 8


def test_a_run_that_is_not_saved_trains_its_reward_model_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setattr('tempfile.tempdir', None)
    result = succeed('train_policy test first --mpi 1 --save_dir None --ppo.total_episodes 64')
    assert '      1/1        64 ' in result.stdout and not list(tmp_path.iterdir())
    assert ', not saved, because --save_dir is None\n' in result.stdout


def test_a_directory_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / 'file').write_text('')
    told = error_of(invoke(f'train_policy test first --mpi 1 --save_dir {tmp_path}/file'))
    assert told.startswith(f'--save_dir: {tmp_path}/file is not a directory that you may write to')
