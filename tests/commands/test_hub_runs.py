"""Trainings from what is on the hub: its model, labels and queries, and the commits recorded."""

import json
import shutil
from unittest import mock

import pytest
from command_line import error_of, invoke, last_error_of, succeed
from experiments import resolved
from hub_server import commit_of, files_in, forget
from sample_files import write_hugging_face
from tiny_causal_lms import save, tiny
from tiny_classifiers import write_classifier
from tiny_tokenisers import write_words

from lm_human_preferences import storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language.causal_lm.architecture import CausalLM
from lm_human_preferences.runs import run_settings
from lm_human_preferences.trainers.additions import session

WORDS = [f'word{i}' for i in range(26)]
PREFERENCE = {'prompt': 'word0 word1', 'chosen': 'word2 word3', 'rejected': 'word4'}
SETTINGS = (
    '--labels.type=best_of_2 --labels.num_train=8 --labels.held_out=0 --batch_size=4'
    ' --rollout_batch_size=4 --normalize_samples=4 --task.query_length=3 --task.response_length=2'
    ' --task.start_text=None --task.truncate_token=None --mpi=1'
)
DATA = 'hf://datasets/org/data'


@pytest.fixture
def hub(hub_server, tmp_path):
    directory = tmp_path / 'gpt2'
    directory.mkdir()
    write_hugging_face(directory, n_vocab=309)
    write_words(directory, WORDS)
    (directory / 'encoding').unlink()
    lines = [json.dumps({**PREFERENCE, 'rejected': word}) for word in WORDS]
    for name in ('org/gpt2', 'org/other'):
        hub_server.holds[name] = {'main': files_in(directory)}
    data = {'labels/train.jsonl': '\n'.join(lines).encode()}
    data['queries.jsonl'] = b'"word5 word6 word7"\n' * 20
    hub_server.holds['datasets/org/data'] = {'main': data}
    return hub_server


def train_reward(tmp_path, *more, model='org/gpt2', name='run'):
    words = [f'--save_dir={tmp_path}', f'--task.policy.initial_model={model}']
    words += [f'--labels.source={DATA}/labels/train.jsonl']
    words += [f'--task.query_dataset={DATA}/queries.jsonl']
    return invoke(['train_reward', 'test', name, *SETTINGS.split(), *words, *more])


def recorded(tmp_path, name='run'):
    return json.loads((tmp_path / name / 'train_reward_hparams.json').read_text())


def test_a_run_records_its_commits_and_goes_on_with_them(hub, tmp_path, monkeypatch):
    model, data = (commit_of(hub.holds[name]['main']) for name in ('org/gpt2', 'datasets/org/data'))
    result = train_reward(tmp_path)
    assert result.exit_code == 0, result.output
    settings = recorded(tmp_path)
    assert settings['task']['policy']['initial_model'] == f'org/gpt2@{model}'
    assert settings['labels']['source'] == f'{DATA}@{data}/labels/train.jsonl'
    assert settings['task']['query_dataset'] == f'{DATA}@{data}/queries.jsonl'
    # Both have moved, and then cannot be asked: the same command, and `resume`, do not care.
    for repository in ('org/gpt2', 'datasets/org/data'):
        hub.holds[repository] = {'main': {'moved': b''}}
    forget()
    result = train_reward(tmp_path, '--run.resume')
    assert result.exit_code == 0, result.output
    assert recorded(tmp_path) == settings
    shutil.rmtree(tmp_path / 'run' / 'reward_model' / 'checkpoints')  # so it has to learn again
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    succeed(['resume', str(tmp_path / 'run')])
    for other in ('org/other', f'org/gpt2@{40 * "a"}'):
        told = error_of(train_reward(tmp_path, '--run.resume', model=other))
        assert told.startswith('--task.policy.initial_model org/')


def test_all_ranks_take_the_commits_that_rank_0_finds(hub, tmp_path):
    class SecondRank(Comm):
        rank = 1

        def on_rank_0(self, work):
            return {'task.policy.initial_model': 'org/gpt2@1234'}

    hparams = resolved('train_reward', 'test')
    hparams.task.policy.initial_model = 'org/gpt2'
    session.pin(hparams, SecondRank())
    assert hparams.task.policy.initial_model == 'org/gpt2@1234'
    assert hub.log == []


def test_a_dry_run_checks_what_the_cache_has_and_asks_for_nothing(hub, tmp_path):
    result = train_reward(tmp_path, '--dry_run')
    assert result.exit_code == 0, result.output
    assert 'not on this machine: --task.policy.initial_model org/gpt2' in result.output
    assert hub.log == []
    assert train_reward(tmp_path).exit_code == 0
    forget()
    hub.log.clear()
    result = train_reward(tmp_path, '--dry_run', '--task.query_length=7', name='other')
    commit = commit_of(hub.holds['org/gpt2']['main'])
    assert f'the 8 of --task.policy.initial_model org/gpt2@{commit}' in result.stderr
    result = train_reward(tmp_path, '--dry_run', name='other')
    assert result.exit_code == 0 and 'not on this machine' not in result.output
    # As for any remote file of queries, it is asked whether there is one of the test split.
    assert all('/org/data' in line or line == 'HEAD /' for line in hub.log)
    assert not hub.requests('GET /datasets')


def test_a_dry_run_runs_a_network_that_the_cache_has(hub, tmp_path, monkeypatch):
    directory = save(tiny('llama', vocab_size=309), tmp_path / 'llama')
    write_words(directory, WORDS)
    (directory / 'encoding').unlink(missing_ok=True)
    hub.holds['org/llama'] = {'main': files_in(directory)}
    storage.pinned('org/llama')
    name = f'org/llama@{commit_of(hub.holds["org/llama"]["main"])}'
    told = train_reward(tmp_path, '--dry_run', model='org/llama').stderr
    assert f'not on this machine: the weights of --task.policy.initial_model {name}' in told
    storage.cached_directory(f'hf://{name}')
    unfit = mock.Mock(side_effect=UserError('unfit'))
    monkeypatch.setattr(CausalLM, 'check_network', unfit)
    result = train_reward(tmp_path, '--dry_run', model='org/llama')
    assert last_error_of(result) == 'unfit'


def test_a_classifier_of_the_hub_is_the_reward(hub, tmp_path):
    directory = write_classifier(tmp_path / 'classifier', names=('bad', 'good'))
    (tmp_path / 'classifier/pytorch_model.bin').write_bytes(b'pickled')
    hub.holds['org/sentiment'] = {'main': files_in(directory)}
    argv = (
        f'train_policy mock_sentiment run --save_dir={tmp_path} --mpi=1 --ppo.total_episodes=64'
        ' --run.evaluate=off --rewards.train_new_model=off'
        ' --rewards.trained_model=org/sentiment --rewards.class_name=good'
    )
    result = invoke(f'{argv} --dry_run')
    assert result.exit_code == 0 and hub.log == [], result.output
    assert '--rewards.trained_model org/sentiment' in result.stderr.splitlines()[-1]
    storage.pinned('org/sentiment')  # its description alone
    (*_, last) = succeed(f'{argv} --dry_run').stderr.splitlines()
    assert '--rewards.trained_model hf://org/sentiment@' in last
    succeed(argv)
    settings = json.loads((tmp_path / 'run/train_policy_hparams.json').read_text())
    commit = commit_of(hub.holds['org/sentiment']['main'])
    assert settings['rewards']['trained_model'] == f'hf://org/sentiment@{commit}'
    assert hub.requests('model.safetensors') and not hub.requests('pytorch_model.bin')
    texts = tmp_path / 'texts.jsonl'
    texts.write_text('{"query": "the", "response": "film"}\n')
    succeed(['score', 'org/sentiment#good', str(texts)])


def test_where_a_new_reward_model_will_be_is_not_looked_up_on_the_hub(hub):
    hparams = resolved('train_policy', 'test')
    hparams.rewards.trained_model = 'org/gpt2'
    hparams.rewards.train_new_model = None
    assert run_settings.pins(hparams)['rewards.trained_model'].startswith('hf://org/gpt2@')
    hparams.rewards.train_new_model = reward_options.HParams()
    assert 'rewards.trained_model' not in run_settings.pins(hparams)


def test_questions_record_the_commit_that_they_are_drawn_from(hub, tmp_path):
    succeed(
        f'ask test {tmp_path}/folder --count=1 --task.policy.initial_model=org/gpt2'
        f' --labels.type=best_of_2 --task.query_dataset={DATA}/queries.jsonl --task.query_length=3'
        ' --task.response_length=2 --task.start_text=None --task.truncate_token=None'
    )
    task = json.loads((tmp_path / 'folder/task.json').read_text())['task']
    commit = commit_of(hub.holds['org/gpt2']['main'])
    assert task['policy']['initial_model'] == f'org/gpt2@{commit}'
