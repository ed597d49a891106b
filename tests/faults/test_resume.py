"""Interrupted trainings go on: nothing is lost, nothing differs from an uninterrupted run."""

import fcntl
import itertools
import json
import os
import re
import shutil
import socket
from unittest import mock

import numpy as np
import pytest
import torch
from command_line import error_of, invoke, last_error_of, succeed
from events import events_of
from interrupted import (
    ANALYZED,
    TRAIN_MINIBATCH,
    assert_same,
    failing,
    result_anywhere,
    result_of,
    run,
)
from ranks import give_each_thread_its_own_numpy_random, on_ranks

from lm_human_preferences import train_policy, train_reward
from lm_human_preferences.checkpointing import checkpointer, checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_dir
from lm_human_preferences.utils import event_files
from lm_human_preferences.utils.logging import Logger

# 5 steps, 2 checkpoints
SMALL = '--labels.num_train 160 --normalize_samples 64 --run.save_interval 2'
COMMANDS = {
    'train_reward': SMALL,
    'train_policy': (
        '--ppo.total_episodes 192 --ppo.noptepochs 2 --run.save_interval 2 '  # 3 steps
        + SMALL.replace('--', '--rewards.train_new_model.')
    ),
}


def words(command, directory, more=''):
    return f'{command} test run --mpi 1 --save_dir {directory} {COMMANDS[command]} {more}'.split()


@pytest.fixture(scope='module', params=COMMANDS)
def reference(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    counter = directory / 'moments'
    assert run(words(request.param, directory), directory / 'out', counter=counter) == 0
    return request.param, result_anywhere(directory), int(counter.read_text())


def interrupted(command, directory, kill_at, more=''):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    assert run(words(command, directory, more), directory / 'out', kill_at=kill_at) == -9


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp('whole')
    assert run(words('train_policy', directory), directory / 'out') == 0
    return directory / 'run'


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'run')


@pytest.mark.slow
def test_killed_at_any_moment(reference, tmp_path):
    """Around each step and each system call of saving; half of the runs are killed twice."""
    command, expected, moments = reference
    assert moments > 30
    for moment in range(1, moments + 1, 1 if os.environ.get('LMHP_FAULTS') else moments // 5):
        directory = tmp_path / 'killed'
        interrupted(command, directory, moment)
        again = words(command, directory, '--run.resume on')
        if moment % 2:
            assert run(again, directory / 'out', kill_at=15) in (-9, 0)
        if (directory / f'run/{command}_hparams.json').exists():
            again = ['resume', str(directory / 'run')]
        assert run(again, directory / 'out') == 0, (moment, (directory / 'out').read_text()[-1000:])
        try:
            assert_same(result_anywhere(directory), expected)
        except AssertionError as e:
            raise AssertionError(f'killed at moment {moment}') from e


@pytest.mark.parametrize('process, time_passed', [(998, 0), (1002, -3600)])
def test_events_stay_in_order_whatever_the_clock_and_the_process(
    tmp_path, monkeypatch, process, time_passed
):
    """Process ids begin again from 1, and another machine's clock may be behind."""
    for step, (number, now) in enumerate([(999, 1e9), (process, 1e9 + time_passed)]):
        with monkeypatch.context() as patch:
            patch.setattr(os, 'getpid', lambda number=number: number)
            patch.setattr('time.time', lambda now=now: now)
            logger = Logger(str(tmp_path), 'ppo', log_interval=1, comm=Comm())
            logger.purge_from(step)
            logger.log({'a': step}, step)
            logger.close()
    seconds = sorted(int(path.name.split('.')[3]) for path in (tmp_path / 'tb/ppo').iterdir())
    assert seconds == [10**9, 10**9 + 1]
    assert events_of(tmp_path / 'tb/ppo') == {'a': [(0, 0), (1, 1)]}


def test_a_file_of_events_that_are_all_done_again_is_deleted(tmp_path):
    """Where a run begins again from its first step; a later one keeps what came before it."""
    folder = tmp_path / 'tb/ppo'
    logger = Logger(str(tmp_path), 'ppo', log_interval=1, comm=Comm())
    for step in range(3):
        logger.log({'a': step}, step)
    logger.close()
    event_files.purge(str(folder), 2)
    assert events_of(folder) == {'a': [(0, 0), (1, 1)]}
    event_files.purge(str(folder), 0)
    assert list(folder.iterdir()) == []


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path, monkeypatch):
    """As by an hour when it is corrected; a checkpoint has the time of day, as the original's."""
    clock = itertools.count(10_000.0, -3600.0)
    monkeypatch.setattr('time.time', lambda: next(clock))
    words = (
        f'train_policy test run --mpi 1 --save_dir {tmp_path} --ppo.total_episodes 192'
        ' --rewards.train_new_model off --rewards.trained_model test'
    )
    succeed(words)
    events = events_of(tmp_path / 'run/tb/ppo')
    times = [value for _, value in events['elapsed/time']]
    assert times == sorted(times) and 0 < times[-1] < 600
    assert all(value < 1e6 for _, value in events['elapsed/fps'])
    bundle = Bundle(f'{tmp_path}/run/policy/checkpoints/model.ckpt-3')
    (start,) = (bundle[name] for name in bundle if name.endswith('start_time'))
    assert start < 10_000


@pytest.mark.parametrize('interval, is_lost', [(1, True), (2, False)])
def test_checkpoints_that_are_gone(interval, is_lost, tmp_path):
    """Steps that were saved are not taken again in silence; those of a kill may be."""
    words = (
        f'train_policy test run --mpi 1 --save_dir {tmp_path} --ppo.total_episodes 192'
        f' --run.save_interval {interval} --rewards.train_new_model off --rewards.trained_model'
        ' test'
    )
    succeed(words)
    shutil.rmtree(tmp_path / 'run/policy/checkpoints')
    told = f'{tmp_path}/run logged 3 steps of the policy but has no checkpoints: '
    result = invoke(f'resume {tmp_path}/run')
    if is_lost:
        assert last_error_of(result) == f'{told}restore them, or begin again with --overwrite'
    else:
        assert f'WARNING: {told}it begins with the first step again' in result.stdout
        assert 'WARNING' not in succeed(f'resume {tmp_path}/run').stdout


def test_what_is_no_run_of_a_policy(copied):
    refusal = error_of(invoke(f'resume {copied} --normalize_samples 3'))
    assert refusal == '--normalize_samples is not an option of train_policy'
    os.remove(copied / 'train_policy_hparams.json')
    for directory in (copied, copied.parent):
        told = f'{directory} holds no run to resume: it has no train_policy_hparams.json'
        assert last_error_of(invoke(f'resume {directory}')).startswith(told)


@pytest.mark.parametrize('error', [ConnectionError, KeyboardInterrupt])
def test_error_while_responses_are_scored_undoes_the_step(whole, tmp_path, error):
    """No weight has changed, so the run goes on as if it had not been."""
    with failing(ANALYZED, 4, error('gone')):  # after all responses of the second step
        result = invoke(words('train_policy', tmp_path, '--run.save_interval 9'))
    told = 'Step 1 of the policy is saved; to go on from there: '
    assert result.output.count(told) == 1, result.output
    assert checkpoints.latest(tmp_path / 'run/policy/checkpoints').endswith('model.ckpt-1')
    succeed(['resume', str(tmp_path / 'run'), '--run.save_interval', '2'])
    runs = tmp_path / 'run', whole
    ours, expected = (Bundle(f'{run}/policy/checkpoints/model.ckpt-3') for run in runs)
    for name in expected:
        if not name.endswith('_time'):
            assert (ours[name] == expected[name]).all(), name


def test_error_in_the_midst_of_a_step_saves_but_does_not_go_on_from_there(tmp_path):
    """The last weights are kept; the run goes on from the last whole step that was saved."""
    with failing(TRAIN_MINIBATCH, 4, KeyboardInterrupt):
        assert invoke(words('train_policy', tmp_path, '--run.save_interval 1')).exit_code == 130
    found = tmp_path / 'run/policy/checkpoints'
    assert checkpoints.latest(found) == str(found / 'model.ckpt-1')
    assert not (tmp_path / 'run/lock').exists()
    result = succeed(['resume', str(tmp_path / 'run'), '--run.keep_checkpoints', '2'])
    assert f'Going on from {found}/model.ckpt-1\n' in result.stdout
    assert checkpoints.latest(found) == str(found / 'model.ckpt-3')
    assert len(list(found.glob('*.index'))) == 2


def test_killed_before_the_last_checkpoint_is_listed(copied):
    """All of its files are there, so the run is finished, and is listed when it goes on."""
    found = copied / 'policy/checkpoints'
    (found / 'checkpoint').write_bytes(checkpoints.format_checkpoint_file(['model.ckpt-2']))
    assert checkpoints.latest_resumable(str(found))[0] == str(found / 'model.ckpt-3')
    assert checkpoints.latest(found) == str(found / 'model.ckpt-2')
    succeed(f'resume {copied}')
    assert checkpoints.latest(found) == str(found / 'model.ckpt-3')


def test_another_machine_and_another_number_of_ranks(tmp_path, monkeypatch, capsys):
    """elapsed/time counts what the run has cost, not how long the machine was off."""
    interrupted('train_policy', tmp_path, 95)
    _, state = checkpoints.latest_resumable(str(tmp_path / 'run/policy/checkpoints'))
    assert 0 < state['trainer']['elapsed'] < 60
    trainer = mock.Mock(last_time=1000.0)
    train_policy.PPOTrainer.load_state_dict(trainer, state['trainer'])
    assert trainer.start_time == 1000 - state['trainer']['elapsed']
    hparams = train_policy.HParams()
    hparams.override_from_json_file(str(tmp_path / 'run/train_policy_hparams.json'))
    hparams.run.resume = True
    hparams.ppo.total_episodes = 256
    hparams.run.sample_queries = 0  # which have a stream of their own, and restore the other
    give_each_thread_its_own_numpy_random(monkeypatch)
    monkeypatch.setattr(np.random, 'set_state', lambda state: pytest.fail('of another rank'))
    on_ranks(2, lambda comm: train_policy.train(hparams, comm))
    note = 'note: 2 rank(s) on CPU, before 1 rank(s) on CPU: results differ from those'
    assert note in capsys.readouterr().out
    assert checkpoints.latest(tmp_path / 'run/policy/checkpoints').endswith('model.ckpt-4')


def test_random_state_goes_through_json():
    before = checkpointer.random_state()
    drawn = np.random.standard_normal(3), torch.rand(3)  # an odd number: numpy keeps one in reserve
    between = checkpointer.random_state()
    further = np.random.standard_normal(3), torch.rand(3)
    for state, values in ((before, drawn), (between, further)):
        checkpointer.set_random_state(json.loads(json.dumps(state)))
        assert (np.random.standard_normal(3) == values[0]).all()
        assert torch.equal(torch.rand(3), values[1])


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp('finished')
    succeed(words('train_reward', directory))
    return directory


def test_finished_name_is_refused(finished):
    before = result_of(finished / 'run')
    for command in COMMANDS:
        refusal = error_of(invoke(words(command, finished)))
        assert f'{finished}/run holds a run already: resume it by `./launch.py res' in refusal
        assert 'or give --overwrite to delete it' in refusal
    argv = words('train_reward', finished, '--overwrite --run.resume on')
    assert error_of(invoke(argv)).startswith('--overwrite and --run.resume contradict each other')
    hparams = train_reward.HParams()
    hparams.override_from_json_file(str(finished / 'run/train_reward_hparams.json'))
    with pytest.raises(UserError, match='holds a run already'):  # whoever calls it
        train_reward.train(hparams)
    assert_same(result_of(finished / 'run'), before)


def test_a_restart_by_the_launcher_loses_nothing(finished, monkeypatch):
    argv, before = words('train_reward', finished), result_of(finished / 'run')
    monkeypatch.setenv('SLURM_RESTART_COUNT', '1')
    saved = 'what this run had saved before torchrun or Slurm restarted it'
    for given in (argv, [*argv, '--overwrite']):
        refusal = error_of(invoke(given))
        assert refusal.startswith(f'{finished}/run holds {saved}: to go on from there, give')
    assert_same(result_of(finished / 'run'), before)
    monkeypatch.setenv('SLURM_RESTART_COUNT', '0')
    assert 'holds a run already' in error_of(invoke(argv))


def test_overwrite_deletes_its_own_files_only(tmp_path):
    argv = words('train_reward', tmp_path)
    succeed(argv)
    names = 'notes tb/mine reward_model/checkpoints/model.ckpt.index.bak policy/hparams.json'
    names += ' reward_model/x.part reward_model_x tb/reward_model/mine'
    names += ' other/train_reward_hparams.json'
    mine = [tmp_path / 'run' / name for name in names.split()]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text('mine')
    left = tmp_path / 'run/reward_model/unfinished/model.ckpt-4.index.12.part'
    left.parent.mkdir()
    left.write_text('half')
    succeed([*argv, '--overwrite', '--run.seed', '2'])
    assert [path.read_text() for path in mine] == ['mine'] * len(mine)
    assert not left.exists()
    assert len(list((tmp_path / 'run/tb/reward_model').glob('events.*'))) == 1


def test_a_policy_beside_its_reward_model(finished, tmp_path):
    """Both trainings may share a directory: what they write, and delete, differs."""
    shutil.copytree(finished / 'run', tmp_path / 'run')
    policy = (
        f'train_policy test run --mpi 1 --save_dir {tmp_path} --ppo.total_episodes 64 '
        f'--rewards.train_new_model off --rewards.trained_model {tmp_path}/run'
    )
    succeed(policy)
    succeed(f'{policy} --overwrite')
    assert 'holds a run already' in error_of(invoke(words('train_reward', tmp_path)))


def hparams_in(directory):
    return train_reward.HParams(run=train_reward.RunHParams(save_dir=str(directory)))


def comm_of(rank=0):
    return mock.Mock(rank=rank, size=1)


def test_running_name_is_refused(tmp_path):
    with (
        run_dir.lock_run_dir(hparams_in(tmp_path / 'run'), comm_of()),
        run_dir.lock_run_dir(hparams_in(tmp_path / 'run'), comm_of(rank=1)),
    ):
        told = re.compile(
            rf'{tmp_path}/run/lock: process {os.getpid()} on {socket.gethostname()}, '
            r'since \d{4}-[-\d]+ [:\d]+, 1 rank\(s\) is writing this run: .*'
        )
        for more in ('', '--overwrite', '--run.resume on'):
            assert told.fullmatch(error_of(invoke(words('train_reward', tmp_path, more))))
        with (
            pytest.raises(UserError, match=told.pattern),
            run_dir.lock_run_dir(hparams_in(tmp_path / 'run'), comm_of()),
        ):
            pass
        assert (tmp_path / 'run/lock').exists()
    assert not (tmp_path / 'run').exists()  # nothing was kept


def test_lock_of_a_killed_process_is_taken_over(tmp_path):
    interrupted('train_reward', tmp_path, 25)
    assert run_dir.ranks_of(str(tmp_path / 'run')) == 1
    assert run(['resume', str(tmp_path / 'run')], tmp_path / 'again') == 0
    assert not (tmp_path / 'run/lock').exists()


@pytest.mark.parametrize('is_made_anew', [False, True])
def test_lock_that_was_deleted_before_it_was_taken(tmp_path, monkeypatch, is_made_anew):
    """As by another process, which has ended, and perhaps by one that has begun since."""
    take = fcntl.flock

    def take_late(file, kind):
        (tmp_path / 'lock').unlink()
        if is_made_anew:
            (tmp_path / 'lock').touch()
        take(file, kind)

    monkeypatch.setattr(fcntl, 'flock', take_late)
    with (
        pytest.raises(UserError, match='a process is writing this run'),
        run_dir.held(str(tmp_path), ranks=1),
    ):
        pass


def test_what_was_killed_before_it_had_its_settings_is_no_run(tmp_path):
    hparams = hparams_in(tmp_path)
    command = hparams.command
    (tmp_path / 'run.json').write_text('{}')
    (tmp_path / f'{command}_hparams.json.7.part').write_text('{')
    run_dir.refuse_existing(hparams)
    assert run_dir.resume_hint(hparams).startswith('Nothing is saved yet')
    (tmp_path / f'{command}_hparams.json').write_text('{}')
    with pytest.raises(UserError, match='holds a run already'):
        run_dir.refuse_existing(hparams)


def test_lock_that_another_process_has_made_anew_stays(tmp_path):
    with run_dir.held(str(tmp_path), ranks=1):
        (tmp_path / 'lock').unlink()  # by a user who thinks that this process has ended
        other = run_dir.held(str(tmp_path), ranks=1)
        other.__enter__()
    assert (tmp_path / 'lock').exists()
    other.__exit__(None, None, None)


def test_lock_of_another_host(tmp_path):
    (tmp_path / 'lock').write_text('process 7 on elsewhere, since 2019-09-19 10:00:00, 8 rank(s)')
    told = pytest.raises(UserError, match=r'8 rank\(s\) is writing .* ended, delete this file')
    with told, run_dir.lock_run_dir(hparams_in(tmp_path), comm_of()):
        pass


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp('saved')
    rng = np.random.default_rng(0)
    for step in (1, 2):
        tensors = {f'a/{i}': rng.standard_normal((9, 11), np.float32) for i in range(20)}
        state = {'trainer': {'step': step}, 'random': [checkpointer.random_state()]}
        checkpoints.save(str(directory), f'model.ckpt-{step}', tensors, state=state)
    return directory


@pytest.mark.parametrize('suffix', ['.index', '.data-00000-of-00001', '.resume.json'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(saved, suffix, capsys):
    """A file that ends too early. Every flipped bit: test_damaged_files.py."""
    path = saved / f'model.ckpt-2{suffix}'
    whole = path.read_bytes()
    for damaged in (b'', whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(damaged)
        prefix, state = checkpoints.latest_resumable(str(saved))
        assert prefix == str(saved / 'model.ckpt-1') and state['trainer'] == {'step': 1}
        (warning,) = capsys.readouterr().out.splitlines()
        checkpoint = f'{saved}/model.ckpt-2'
        assert warning.startswith(f'WARNING: {checkpoint} is skipped: {checkpoint}.')
    path.unlink()
    os.mkfifo(path)
    assert checkpoints.latest_resumable(str(saved))[0] == str(saved / 'model.ckpt-1')
    assert f'{path} is not a file' in capsys.readouterr().out
    path.unlink()
    path.write_bytes(whole)
    assert checkpoints.latest_resumable(str(saved))[0] == str(saved / 'model.ckpt-2')


def test_nothing_whole_is_left(saved, tmp_path):
    for name in ('model.ckpt-1.index', 'model.ckpt-1.resume.json'):
        shutil.copy(saved / name, tmp_path)
    (tmp_path / 'model.ckpt-1.data-00000-of-00001').write_bytes(b'')
    with pytest.raises(UserError) as e:
        checkpoints.latest_resumable(str(tmp_path))
    assert str(e.value) == f'no checkpoint in {tmp_path} is intact: begin again with --overwrite'


def test_no_room_is_told_before_training(tmp_path):
    usage = shutil.disk_usage
    more = '--run.save_interval 1 --ppo.total_episodes 3200 --rewards.train_new_model off'
    argv = (
        f'train_policy test run --mpi 1 --save_dir {tmp_path} {more} --rewards.trained_model test'
    )
    with mock.patch('shutil.disk_usage', lambda path: usage(path)._replace(free=10 << 20)):
        refusal = last_error_of(invoke(argv))
    directory = f'{tmp_path}/run/policy/checkpoints'
    assert f'{directory} has 10 MiB free, but 21 checkpoints will take 21 MiB' in refusal
    assert not (tmp_path / 'run/policy').exists()
