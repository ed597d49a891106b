"""storage's hf:// paths, and models called ORG/NAME, against a loopback imitation of the hub."""

import json
import os
import types

import pytest
from blobserver.server import BlackHole
from hub_server import commit_of, files_in, forget
from huggingface_hub import constants

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.storage import hub

WANTED = {
    'config.json': b'{"model_type": "gpt2"}',
    'model-00001-of-00002.safetensors': b'1' * 1000,
    'model-00002-of-00002.safetensors': b'2' * 2000,
    'model.safetensors.index.json': b'{"weight_map": {}}',
    'tokenizer.json': b'{}',
    'tokenizer.model': b'pieces',
    'merges.txt': b'a b',
    'vocab.txt': b'a',
    'chat_template.jinja': b'{{ messages }}',
}
UNWANTED = (
    'additional_chat_templates/tools.jinja pytorch_model.bin rng.pt vocab.pkl modeling_custom.py'
    ' tokenizer_custom.py consolidated.safetensors README.md onnx/config.json'
    ' original/model.safetensors'
).split()
MODEL = {**WANTED, **dict.fromkeys(UNWANTED, b'x')}
LABELS = 'hf://datasets/org/labels/sentiment/offline.json'


@pytest.fixture(autouse=True)
def some_of_each(hub_server):
    holds = hub_server.holds
    holds['org/model'] = {'main': MODEL, 'v1': {**MODEL, 'merges.txt': b'old'}}
    holds['datasets/org/labels'] = {'main': {'sentiment/offline.json': b'[1]'}}


def failure(call, *arguments):
    with pytest.raises(storage.StorageError) as caught:
        call(*arguments)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_of_a_model_comes_what_can_be_read_and_nothing_else(hub_server):
    directory = storage.cached_directory('hf://org/model')
    assert files_in(directory) == WANTED
    assert not any(hub_server.requests(f'/{name}') for name in UNWANTED)


def test_a_commit_is_fetched_once_and_never_asked_about_again(hub_server):
    path = storage.pinned('hf://org/model')
    assert path == f'hf://org/model@{commit_of(MODEL)}'
    assert hub_server.requests('.safetensors') == 2  # the index; weights wait until they are used
    directory = storage.cached_directory(path)
    assert hub_server.requests('GET /org/model/resolve') == len(WANTED)
    assert not storage.exists(storage.join(path, 'hparams.json'))
    hub_server.log.clear()
    forget()
    assert storage.pinned(path) == path
    assert storage.cached_directory(path) == directory
    assert storage.read_json(storage.join(path, 'config.json')) == {'model_type': 'gpt2'}
    assert storage.exists(storage.join(path, 'config.json'))
    assert set(hub_server.log) <= {'HEAD /'}  # whether there is a network at all


def test_a_branch_that_moves_is_followed_by_the_next_process(hub_server):
    before = storage.pinned('hf://org/model')
    hub_server.holds['org/model']['main'] = moved = {**MODEL, 'merges.txt': b'b a'}
    assert storage.pinned('hf://org/model') == before
    forget()
    after = storage.pinned('hf://org/model')
    assert after == f'hf://org/model@{commit_of(moved)}'
    assert storage.read_text(f'{after}/merges.txt') == 'b a'
    assert storage.read_text(f'{before}/merges.txt') == 'a b'
    assert storage.read_text('hf://org/model@v1/merges.txt') == 'old'


def test_what_was_interrupted_is_completed(hub_server):
    path = f'hf://org/model@{commit_of(MODEL)}'
    storage.cached_path(f'{path}/config.json')
    assert files_in(storage.cached_directory(path)) == WANTED
    os.remove(os.path.join(storage.cached_directory(path), 'model-00002-of-00002.safetensors'))
    forget()
    assert files_in(storage.cached_directory(path)) == WANTED


def test_a_file_of_a_data_set(hub_server):
    assert storage.is_remote(LABELS) and not storage.is_here(LABELS)
    assert storage.exists(LABELS)
    assert storage.read_json(LABELS) == [1]
    assert storage.is_here(LABELS)
    assert storage.cached_paths([LABELS]) == [storage.cached_path(LABELS)]
    commit = commit_of({'sentiment/offline.json': b'[1]'})
    at_commit = f'hf://datasets/org/labels@{commit}/sentiment/offline.json'
    assert storage.pinned(LABELS) == at_commit
    assert storage.read_json(at_commit) == [1]
    assert hub_server.requests('GET /datasets') == 1
    assert not storage.exists('hf://datasets/org/labels/descriptiveness.json')
    assert not storage.exists('hf://datasets/org/others/labels.json')
    assert 'Entry Not Found' in failure(storage.read_json, 'hf://datasets/org/labels/x.json')


@pytest.mark.parametrize(
    'path',
    ['hf://', 'hf://datasets/org/labels', 'hf://org/model/../x', 'hf://org'],
)
def test_unusable_paths(path):
    assert 'give hf://ORG/NAME' in failure(storage.cached_path, path)


def test_names_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('org/model', 'org/model@v1', 'Org-1/Model_2.5-B'):
        assert storage.model_path(name) == f'hf://{name}'
    assert storage.model_path('hf://org/model') == 'hf://org/model'
    for path in ('hf://org/model/config.json', 'hf://datasets/org/data/labels.json'):
        assert 'this path is not a model: give hf://ORG/NAME' in failure(storage.model_path, path)
    others = ('model', './org/model', '/org/model', 'org/model/x', '../model')
    for name in others:
        assert storage.model_path(name) is None
    os.makedirs('org/model')
    assert storage.model_path('org/model') is None  # a local path comes first
    assert TrainedModel('org/model').savedir == 'org/model'


@pytest.mark.parametrize(
    'recorded, given, expected',
    [
        ('org/model@{}', 'org/model', True),
        ('hf://datasets/org/labels@{}/a.json', 'hf://datasets/org/labels/b.json', False),
        ('org/model@{}', 'org/model@' + 40 * 'b', False),
        ('org/model@v1', 'org/model', False),
        (None, 'org/model', False),
    ],
)
def test_which_name_a_commit_was_recorded_for(recorded, given, expected):
    recorded = recorded and recorded.format(40 * 'a')
    assert storage.is_pin_of(recorded, given) == expected


@pytest.mark.parametrize(
    'network, reason',
    [
        ('offline', 'LMHP_OFFLINE=1'),
        ('refuses', 'the hub cannot be reached: [Errno 111] Connection refused'),
        ('is silent', 'the hub cannot be reached: timed out'),
    ],
)
def test_without_a_network_the_cache_is_used(monkeypatch, capsys, network, reason):
    storage.cached_directory('hf://org/model')
    storage.cached_path(LABELS)
    forget()
    with BlackHole() as hole:
        port = hole.port if network == 'is silent' else 9
        monkeypatch.setattr(hub, 'ANSWER_TIMEOUT', 0.3)
        monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{port}')
        if network == 'offline':
            monkeypatch.setenv('LMHP_OFFLINE', '1')
        path = storage.pinned('hf://org/model')
        assert path == f'hf://org/model@{commit_of(MODEL)}'
        assert files_in(storage.cached_directory(path)) == WANTED
        assert storage.is_here(LABELS) and storage.exists(LABELS)
        assert storage.read_json(LABELS) == [1]
        assert not storage.exists('hf://datasets/org/labels/sentiment/offline.test.jsonl')
        for missing in ('hf://org/other', 'hf://org/model@' + 40 * 'a'):
            told = f'{missing}: the path is not in the cache, and {reason}'
            assert failure(storage.pinned, missing).startswith(told)
        notes = capsys.readouterr().err.count('; its cache is used\n')
        assert notes == (0 if network == 'offline' else 1)


def test_what_the_hub_refuses(hub_server, monkeypatch):
    for module in ('file_download', 'utils._http'):  # the library does not wait between its tries
        waits = types.SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr(f'huggingface_hub.{module}.time', waits)
    told = failure(storage.pinned, 'hf://org/none')
    assert told.startswith('hf://org/none: 401 ') and 'Repository Not Found' in told
    assert told.endswith('(private or gated: set HF_TOKEN to your token)')
    assert 'Revision Not Found' in failure(storage.pinned, 'hf://org/model@v9')
    hub_server.gated.add('org/model')
    told = failure(storage.pinned, 'hf://org/model')
    assert 'gated repo' in told and told.endswith('set HF_TOKEN to your token)')
    with pytest.raises(storage.StorageError):  # not that there is no such file
        storage.exists('hf://org/model/config.json')
    hub_server.status = 403
    forget()
    assert '403 Forbidden' in failure(storage.read_json, LABELS)
    hub_server.status = 503
    assert '503' in failure(storage.read_json, LABELS)


INDEX = b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'


def test_whether_all_weights_are_in_the_cache(hub_server, tmp_path):
    files = dict.fromkeys(tuple(MODEL)[1:4], b'x') | {'config.json': WANTED['config.json']}
    files['model.safetensors.index.json'] = INDEX
    hub_server.holds['org/model']['main'] = files
    assert not TrainedModel('org/model').has_weights_here()
    directory = storage.cached_directory('hf://org/model')
    assert TrainedModel('org/model').has_weights_here()
    settings = {'peft_type': 'LORA', 'base_model_name_or_path': 'org/model'}
    (tmp_path / 'adapter_config.json').write_text(json.dumps(settings))
    assert TrainedModel(str(tmp_path)).has_weights_here()
    os.remove(os.path.join(directory, 'model-00001-of-00002.safetensors'))
    assert not TrainedModel('org/model').has_weights_here()
    assert not TrainedModel(str(tmp_path)).has_weights_here()


def test_a_name_that_is_neither_a_directory_nor_on_the_hub():
    with pytest.raises(UserError, match='mine, and no model was found: hf://runs/mine: 401 '):
        TrainedModel('runs/mine')
    told = failure(TrainedModel, 'hf://datasets/org/labels/sentiment/offline.json')
    assert told.endswith('this path is not a model: give hf://ORG/NAME')
