"""Runs that are kept in a remote directory, against a loopback imitation of Azure's storage."""

import glob
import os
import re

import pytest
from blobfile import _azure
from blobserver.fixtures import KEY
from blobserver.server import Fault
from command_line import error_of, invoke, last_error_of, succeed
from experiments import resolved
from interrupted import STEP, TRAIN_BATCH, assert_same, result_of, run
from launched import eventually
from online_runs import WORDS as ONLINE

import sample
from lm_human_preferences import storage, train_policy
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.runs import run_dir, run_record, uploads
from lm_human_preferences.trainers.additions import session

STORE = 'az://private/runs'
RUN, CONTAINER = f'{STORE}/run', 'private/runs'
NEW = '--rewards.train_new_model.'
SMALL = (  # 3 steps, then 4
    f'--ppo.total_episodes 256 --ppo.noptepochs 1 --run.save_interval 1 {NEW}labels.num_train 96 '
    f'{NEW}normalize_samples 64 {NEW}run.save_interval 1'
)
WORDS = f'train_policy test run --mpi 1 {SMALL} --save_dir'
DIRECT = (
    'train_policy test run --mpi 1 --ppo.noptepochs 1 --run.save_interval 1'
    f' --rewards.train_new_model off --rewards.trained_model test --save_dir {STORE}'
    ' --ppo.total_episodes'
)


@pytest.fixture
def store(server, blobs, monkeypatch):
    monkeypatch.setenv('AZURE_STORAGE_KEY', KEY)
    monkeypatch.setattr(storage.blobs, 'RETRIES', 1)
    return blobs[CONTAINER]


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp('reference')
    succeed(f'{WORDS} {directory}')
    return anywhere(directory / 'run', directory)


def anywhere(directory, name):
    return {
        key: value.replace(os.fsencode(name), b'DIR') if isinstance(key, str) else value
        for key, value in result_of(directory).items()
    }


def downloaded(store, directory):
    for name, data in store.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return anywhere(directory / 'run', STORE)


def staged(*names):
    return os.path.join(storage.staging_dir(RUN), *names)


def listed(store, state='run/policy/checkpoints/checkpoint'):
    return checkpoints.parse_checkpoint_file(store.get(state, b'').decode())


def after_steps(monkeypatch, actions, method=(train_policy.PPOTrainer, 'step')):
    place, name = method
    step, done = getattr(place, name), []

    def wrapper(*args, **kwargs):
        result = step(*args, **kwargs)
        done.append(result)
        actions.get(len(done), lambda: None)()
        return result

    monkeypatch.setattr(place, name, wrapper)


@pytest.fixture
def staging(tmp_path):
    (tmp_path / 'staging').mkdir()
    return tmp_path / 'staging'


def interrupt():
    raise KeyboardInterrupt


def on_another_machine(monkeypatch, tmp_path):
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'elsewhere'))
    monkeypatch.setattr(run_record, '_THIS_PROCESS', 'elsewhere')


def save(directory, step, content=b'x'):
    for suffix in (checkpoints.DATA, checkpoints.INDEX):
        (directory / f'model.ckpt-{step}{suffix}').write_bytes(content)


def list_steps(directory, *steps):
    names = checkpoints.format_checkpoint_file([f'model.ckpt-{step}' for step in steps])
    (directory / 'checkpoint').write_bytes(names)


def test_a_checkpoint_that_is_replaced_is_not_named_meanwhile(server, store, staging):
    """Such as one of a run that was resumed and has reached the same step by other numbers."""
    upload = (RUN, str(staging), re.compile('.*ckpt.*|.*checkpoint'))
    save(staging, 1, b'one')
    save(staging, 2, b'two')
    list_steps(staging, 1, 2)
    uploads.upload(*upload)
    states = []

    def note_state():
        files = [store[f'run/model.ckpt-2.{end}'] for end in ('index', 'data-00000-of-00001')]
        states.append((listed(store, 'run/checkpoint'), *files))

    server.on_change = note_state
    save(staging, 2, b'another two')
    uploads.upload(*upload)
    assert states[-1] == (['model.ckpt-1', 'model.ckpt-2'], b'another two', b'another two')
    meanwhile = [names for names, *files in states[:-1] if len(set(files)) > 1]
    assert meanwhile and not any(meanwhile)


def test_settings_are_uploaded_before_checkpoints_and_their_list_last(store, staging):
    names = [
        'train_policy_hparams.json',
        'policy/checkpoints/model.ckpt-1.data-00000-of-00001',
        'policy/checkpoints/model.ckpt-1.index',
        'policy/checkpoints/checkpoint',
    ]
    (staging / 'policy/checkpoints').mkdir(parents=True)
    for name in names:
        (staging / name).write_bytes(checkpoints.format_checkpoint_file(['model.ckpt-1']))
    uploads.upload(RUN, str(staging), re.compile('policy/.*|.*json'))
    uploaded = [name.removeprefix('run/') for name in store]
    assert uploaded == names


def test_an_outage_delays_uploads(server, store, reference, tmp_path, monkeypatch):
    """Training goes on, and the next checkpoint uploads what is missing."""
    actions = {
        1: lambda: server.faults.append(Fault('status', 503, times=None)),
        3: lambda: (eventually(lambda: server.faults[0].hits > 3), server.faults.clear()),
    }
    after_steps(monkeypatch, actions)
    result = succeed(f'{WORDS} {STORE}')
    assert f'saving to {RUN}\n' in result.stdout
    assert f'WARNING: {RUN} is not complete: {STORE}' in result.stdout
    assert f'"save_dir": "{RUN}"'.encode() in store['run/train_policy_hparams.json']
    assert not os.path.exists(staged())
    assert_same(downloaded(store, tmp_path), reference)


def test_an_outage_till_the_end(server, store, reference, tmp_path, monkeypatch):
    """All is in the staging directory, which the user is told, and resuming uploads it."""
    after_steps(monkeypatch, {2: lambda: server.faults.append(Fault('status', 503, times=None))})
    message = last_error_of(invoke(f'{WORDS} {STORE}'))
    assert message.startswith(f'{RUN} is not complete: ') and 'status 503' in message
    assert f'{staged()}: to upload the rest, type `./launch.py resume {RUN}`' in message
    assert_same(anywhere(staged(), STORE), reference)
    server.faults.clear()
    assert 'model.ckpt-4' not in listed(store)
    succeed(f'resume {RUN}')
    assert_same(downloaded(store, tmp_path), reference)


@pytest.mark.parametrize('method, step', [(STEP, 3), (TRAIN_BATCH, 2)], ids=['policy', 'reward'])
def test_going_on_elsewhere(store, reference, tmp_path, monkeypatch, method, step):
    """From what the store has, as soon as it has the checkpoint before, when a machine is gone."""
    state = 'policy/checkpoints' if method == STEP else 'reward_model/unfinished'
    listed = [f'{RUN}/{state}/checkpoint', f'ckpt-{step - 1}"']
    die = {'moment': method, 'count': step, 'call': 'remote_calls:die_when_listed'}
    calls = [{**die, 'arguments': listed}]
    assert run(f'{WORDS} {STORE}'.split(), tmp_path / 'out', moments=(), calls=calls) == -9
    words = f'{WORDS} {STORE} --run.resume on' if method == TRAIN_BATCH else f'resume {RUN}'
    on_another_machine(monkeypatch, tmp_path)
    status = run(words.split(), tmp_path / 'out')
    output = (tmp_path / 'out').read_text()
    assert status == 0 and f'Going on from {staged()}' in output, output
    assert_same(downloaded(store, tmp_path), reference)


def test_the_store_is_right_where_another_machine_went_on(store, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        after_steps(patch, {2: interrupt})
        assert invoke(f'{DIRECT} 256').exit_code == 130
    assert os.path.exists(staged('policy/checkpoints/model.ckpt-1.index'))
    with monkeypatch.context() as patch:
        on_another_machine(patch, tmp_path)
        succeed(f'resume {RUN}')
    result = succeed(f'resume {RUN} --ppo.total_episodes 320')
    assert f'Going on from {staged("policy/checkpoints/model.ckpt-4")}\n' in result.stdout
    assert listed(store) == [f'model.ckpt-{n}' for n in range(1, 6)]
    assert sum('model.ckpt' in name for name in store) == 15


def test_a_run_that_was_fetched_in_part_is_fetched_again(store, monkeypatch):
    succeed(f'{DIRECT} 192')
    replace = os.replace

    def break_off(source, target):
        if target == staged('train_policy_hparams.json'):
            raise KeyboardInterrupt
        replace(source, target)

    fetch = (RUN, staged(), re.compile('.*'))
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', break_off)
        with pytest.raises(KeyboardInterrupt):
            uploads.fetch(*fetch)
    assert os.listdir(staged()) and not uploads.is_up_to_date(RUN, staged())
    uploads.fetch(*fetch)
    assert uploads.is_up_to_date(RUN, staged())
    data = glob.glob(staged('policy/checkpoints/*.data-*'))  # not all, as they are large
    fetched = {os.path.basename(path).partition('.data')[0] for path in data}
    assert fetched == {'model.ckpt-2', 'model.ckpt-3'}


def test_a_run_that_was_copied_to_the_store_goes_on(store, tmp_path):
    succeed(f'{DIRECT} 128 --save_dir {tmp_path}')
    for path in (tmp_path / 'run').rglob('*'):
        if path.is_file():
            store[str(path.relative_to(tmp_path))] = path.read_bytes()
    result = succeed(f'resume {RUN} --ppo.total_episodes 192')
    assert f'Going on from {staged("policy/checkpoints/model.ckpt-2")}\n' in result.stdout
    assert listed(store) == ['model.ckpt-1', 'model.ckpt-2', 'model.ckpt-3']
    assert sum('model.ckpt' in name for name in store) == 9


def test_overwrite(store, monkeypatch, tmp_path):
    succeed(f'{DIRECT} 192')
    mine = ('run/notes.txt', 'run/policy/notes.txt', 'run2/train_policy_hparams.json')
    mine += ('run/evaluation.json', 'run/report.html')
    store.update(dict.fromkeys(mine, b'mine'))
    succeed(f'{DIRECT} 64 --overwrite')
    assert listed(store) == ['model.ckpt-1'] and sum('model.ckpt' in name for name in store) == 3
    assert sum('tfevents' in name for name in store) == 1
    assert all(store[name] == b'mine' for name in mine)


def test_overwrite_begins_with_the_lists_of_checkpoints(store):
    """So that none names what is gone, whenever it is killed."""
    names = 'policy/checkpoints/checkpoint policy/checkpoints/model.ckpt-1.index'
    names += ' reward_model/checkpoints/checkpoint reward_model/checkpoints/model.ckpt.index'
    files = {*names.split(), 'train_policy_hparams.json'}
    store.update({f'run/{name}': b'' for name in files})
    hparams = resolved('train_policy', 'test')
    hparams.run.save_dir = RUN
    found = [path.removeprefix(f'{RUN}/') for path in run_dir.own_files(hparams)]
    assert set(found) == files
    assert {path.rpartition('/')[2] for path in found[:2]} == {'checkpoint'}


def test_labels_that_are_collected(store, monkeypatch, tmp_path):
    """They are kept in the store: another machine goes on, and what people said is not deleted."""
    words = f'train_policy test run --mpi 1 {" ".join(ONLINE)} --save_dir'
    with monkeypatch.context() as patch:
        after_steps(patch, {5: interrupt})
        assert invoke(f'{words} {STORE}').exit_code == 130
    answers = store['run/labels/answers/test.jsonl'].count(b'\n')
    on_another_machine(monkeypatch, tmp_path)
    result = invoke(f'resume {RUN}')
    assert result.exit_code == 0 and f'Going on from {staged()}' in result.stdout, result.output
    assert store['run/labels/answers/test.jsonl'].count(b'\n') > answers > 0
    path = 'run/labels/answers/anna.jsonl'
    store[path] = store['run/labels/answers/test.jsonl'].replace(b', "simulated": true', b'')
    message = error_of(invoke(f'{words} {STORE} --overwrite'))
    told = f'--overwrite would delete the answers of people in {STORE}/{path}: '
    assert message.startswith(told)
    assert path in store


def test_what_is_wrong_is_told_at_once(server, store, blobs, monkeypatch):
    begun = []
    monkeypatch.setattr(session.Run, 'check_start', lambda *args: begun.append(args))

    def error(directory=STORE):
        _azure.access_token_manager._expirations.clear()
        storage.blobs._make_client.cache_clear()
        return error_of(invoke(f'{DIRECT} 64 --save_dir {directory}'))

    server.faults.append(Fault('status', 403, times=None, method='PUT'))
    assert error() == f'--save_dir {RUN}/access: the transfer fails: unexpected status 403'
    server.faults.clear()
    missing = "No such file or container/account does not exist: 'az://private/nowhere/run/access'"
    assert missing in error('az://private/nowhere')
    assert error(f'{STORE}/a*').startswith(f"--save_dir '{STORE}/a*/run': give a local path, az:")
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    assert 'LMHP_OFFLINE=1' in error()
    monkeypatch.delenv('LMHP_OFFLINE')
    monkeypatch.delenv('AZURE_STORAGE_KEY')
    assert "Log in with 'az login'" in error()
    assert not begun and not store


def test_runs_in_the_store_are_read(store, tmp_path):
    words = (
        'train_reward test run --mpi 1 --labels.num_train 32 --normalize_samples 16 --save_dir'
        f' {STORE}/reward'
    )
    exported = []
    for seed in (1, 2):
        succeed(f'{words} --run.seed {seed} --overwrite')
        given = f'--rewards.trained_model {STORE}/reward/run --run.seed {seed}'
        succeed(f'{DIRECT} 64 --overwrite {given}')
        succeed(f'export {RUN} {tmp_path}/{seed}')
        exported.append((tmp_path / f'{seed}/model.safetensors').read_bytes())
    assert exported[0] != exported[1]
    result = invoke(f'sample --nsamples 2 --mpi 1 --save_dir {RUN}', sample.cli)
    assert result.exit_code == 0 and result.stdout.count('=' * 80) == 2, result.output


def test_a_list_of_checkpoints_is_deleted_before_what_it_names(store, staging, monkeypatch):
    """So that nobody who reads it finds less than it names."""
    save(staging, 1)
    list_steps(staging, 1)
    upload = (RUN, str(staging), re.compile('.*ckpt.*|.*checkpoint'))
    uploads.upload(*upload)
    for path in staging.glob('*c*kpt*'):
        path.unlink()
    (staging / 'checkpoint').unlink()
    deleted = []
    monkeypatch.setattr(storage, 'remove', deleted.append)
    uploads.upload(*upload)
    assert deleted[0] == f'{RUN}/checkpoint' and len(deleted) == 3
