"""Settings in the files of a run: all of them, and the original can read what it knows."""

import json

import pytest
from experiments import another, resolved
from golden_data import require

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.language.networks import gpt2_files as gpt2
from lm_human_preferences.runs import run_dir, run_record, run_settings
from lm_human_preferences.utils import hyperparams

ONLINE = {'rewards.online': 'on', 'rewards.online.labels': 512, 'run.serve': 'on'}


def changed(hparams, *, but=()):
    values = {}
    fields = hyperparams.fields(type(hparams))
    hparams.override_from_dict({name: 'on' for name in fields if name.endswith('lora')})
    for name, field in fields.items():
        if hyperparams.group_class(field.type) or name in but:
            continue
        group = hparams
        *path, leaf = name.split('.')
        for part in path:
            group = getattr(group, part)
        values[name] = another(field, getattr(group, leaf))
    hparams.override_from_dict(values)
    return values


def write(directory, hparams, **more):
    if hparams.policy is not None and hparams.policy.rewards.function is not None:
        (directory / 'reward.py').write_text('')
        hparams.rewards.function = f'{directory}/reward.py:score'
    run_settings.write(hparams, str(directory), **{'experiment': 'test', 'ranks': 1, **more})


def written(directory):
    return {path.name: json.loads(path.read_text()) for path in directory.glob('*.json')}


@pytest.mark.parametrize('command', ['train_reward', 'train_policy'])
def test_every_option_is_read_back(tmp_path, command):
    hparams = resolved(command, 'test', ONLINE if command == 'train_policy' else None)
    # Those of one start of the program: a resumed run does not go on with them.
    changed(hparams, but=('run.resume', 'run.console'))
    write(tmp_path, hparams, ranks=2)
    read = type(hparams)()
    run_settings.read_settings(read, str(tmp_path))
    assert read == hparams


@pytest.mark.parametrize(
    'settings, commands',
    [
        ({}, 'train_reward train_policy'),
        ({'rewards.train_new_model': 'off', 'rewards.trained_model': 'x'}, 'train_policy'),
        (ONLINE, 'train_policy'),
        ({**ONLINE, 'rewards.train_new_model.features': 'frozen'}, 'train_reward train_policy'),
    ],
)
def test_a_run_owns_the_files_of_the_commands_that_it_does(settings, commands):
    """With online labels, a reward model is in the policy's checkpoints, unless it is a head."""
    assert resolved('train_policy', 'test', settings).commands == commands.split()


def test_a_policy_and_its_reward_model_have_one_task():
    hparams = resolved('train_policy', 'test')
    hparams.validate()
    hparams.rewards.train_new_model.task.query_length += 1
    told = '--task and --rewards.train_new_model.task must be the same'
    with pytest.raises(ValueError, match=told):
        hparams.validate()


def test_a_run_that_was_killed_while_it_wrote_its_settings_goes_on(tmp_path):
    settings = {**ONLINE, 'run.save_dir': str(tmp_path), 'run.resume': True}
    hparams = resolved('train_policy', 'test', settings)
    run_settings.check_settings(hparams, set())
    write(tmp_path, hparams)
    run_settings.check_settings(hparams, set())
    (tmp_path / 'train_policy_hparams.json').unlink()
    run_settings.check_settings(hparams, set())
    assert not run_dir.has_begun(hparams)


@pytest.mark.parametrize('option', ['task.query_dataset', 'rewards.trained_model'])
def test_a_run_goes_on_with_files_of_the_same_content_only(tmp_path, option, capsys):
    """Queries with their test split, and a reward model that no checkpoint holds."""
    path, files = tmp_path / 'q.jsonl', [tmp_path / 'q.jsonl', tmp_path / 'q.test.jsonl']
    settings = {'rewards.train_new_model': 'off', 'rewards.trained_model': 'test'}
    if option == 'rewards.trained_model':
        path = tmp_path / 'classifier'
        path.mkdir()
        files = [path / 'config.json', path / 'model.safetensors']
    for file in files:
        file.write_text('"abc"')
    settings |= {option: str(path), 'run.save_dir': str(tmp_path / 'run')}
    (tmp_path / 'run').mkdir()
    hparams = resolved('train_policy', 'test', settings)
    write(tmp_path / 'run', hparams)
    run_settings.check_settings(hparams, set())
    for file in files:
        file.write_text('"def"')
        told = f'^{path} has changed since this run began: restore it'
        for explicitly_set in (set(), {option}):
            with pytest.raises(UserError, match=told):
                run_settings.check_settings(hparams, explicitly_set)
        file.write_text('"abc"')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    for file in files:
        file.rename(elsewhere / file.name)
    moved = elsewhere if path.is_dir() else elsewhere / path.name
    hparams.override_from_dict({option: str(moved)})
    run_settings.check_settings(hparams, {option})
    note = f'note: going on with --{option} {moved} (before: {path})\n'
    assert capsys.readouterr().err == note
    for file in elsewhere.iterdir():
        file.write_text('"def"')
    with pytest.raises(UserError, match=f'^{moved} has changed since'):
        run_settings.check_settings(hparams, {option})


def test_the_record_holds_defaults_too(tmp_path):
    hparams = resolved('train_policy', 'test')
    write(tmp_path, hparams, ranks=2)
    record = run_record.training(str(tmp_path), 'train_policy')
    assert (record['experiment'], record['ranks']) == ('test', 2)
    found = {'run.precision': 'fp32', 'rewards.online': 'off', 'run.evaluate': False}
    found |= {'rewards.train_new_model.labels.held_out': 0.0, 'ppo.micro_batch_size': None}
    assert found.items() <= record['settings'].items()
    # What is about one start leaves no trace: a run that was resumed is as one that was not.
    assert not {'run.console', 'run.resume'} & record['settings'].keys()
    # A reward model trained in a policy's run has none of the options of the whole command.
    assert 'rewards.train_new_model.run.on_anomaly' not in record['settings']
    of_reward = run_record.training(str(tmp_path), 'train_reward')['settings']
    assert of_reward['labels.held_out'] == 0.0 and 'run.on_anomaly' not in of_reward


def names(nested, prefix=''):
    found = set()
    for key, value in nested.items():
        found |= names(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key}
    return found


def test_the_first_file_holds_what_the_original_knows_and_no_more(tmp_path):
    """Also where other options are not at their defaults: the original goes on reading it."""
    hparams = resolved('train_policy', 'test', {**ONLINE, 'rewards.trained_model': 'x'})
    changed(hparams)
    write(tmp_path, hparams)
    ours = written(tmp_path)['train_policy_hparams.json']
    theirs = json.loads(require('original_save_dir_test', 'train_policy_hparams.json').read_text())
    assert names(ours) == names(theirs)


@pytest.mark.parametrize(
    'text',
    [
        '[]',
        '{"train_reward": {"settings": []}}',
        '{"train_reward": {"settings": {"run.precision": 3}}}',
        '{"train_reward": {"commands": [1]}}',
    ],
)
def test_a_damaged_record_is_named(tmp_path, text):
    write(tmp_path, resolved('train_reward', 'test'))
    (tmp_path / 'run.json').write_text(text)
    with pytest.raises(UserError, match=r'run.json'):
        run_settings.read_settings(reward_options.CommandHParams(), str(tmp_path))


def test_a_record_that_is_gone_is_missed(tmp_path):
    """Else the run would go on with the defaults of all options that the original lacks."""
    write(tmp_path, resolved('train_policy', 'test'))
    (tmp_path / 'run.json').unlink()
    run_settings.read_settings(policy_options.HParams(), str(tmp_path))  # as of the original
    (tmp_path / 'policy/checkpoints').mkdir(parents=True)
    (tmp_path / 'policy/checkpoints/model.ckpt-4.resume.json').touch()
    with pytest.raises(UserError, match=f'^{tmp_path}/run.json, which holds settings of'):
        run_settings.read_settings(policy_options.HParams(), str(tmp_path))


def test_a_run_goes_on_with_as_many_ranks_as_it_had(tmp_path):
    hparams = resolved('train_policy', 'test', {'run.save_dir': str(tmp_path)})
    assert run_dir.ranks_of(str(tmp_path)) is None
    for resumes, ranks in [(False, 4), (True, 2), (False, 1)]:
        hparams.run.resume = resumes
        write(tmp_path, hparams, ranks=ranks)
        assert run_dir.ranks_of(str(tmp_path)) == ranks


def test_settings_that_only_a_fork_knows_are_named_left_alone_and_written_back(tmp_path, capsys):
    """The original read such a file, as it set every name in it as an attribute."""
    hparams = resolved('train_policy', 'test', {'run.save_dir': str(tmp_path)})
    write(tmp_path, hparams)
    of_fork = written(tmp_path)
    policy, reward = of_fork['train_policy_hparams.json'], of_fork['train_reward_hparams.json']
    policy['task_id'] = None
    policy['wandb'] = {'project': 'x'}
    policy['rewards']['train_new_model']['run']['debug'] = reward['run']['debug'] = True
    for name, content in of_fork.items():
        (tmp_path / name).write_text(json.dumps(content))
    again = resolved('train_policy', 'test', {'run.save_dir': str(tmp_path), 'run.resume': True})
    run_settings.check_settings(again, set())
    note = capsys.readouterr().err
    assert note.startswith(f'note: {tmp_path}/train_policy_hparams.json ')
    assert note.endswith(': task_id, wandb, rewards.train_new_model.run.debug\n')
    write(tmp_path, again)
    assert written(tmp_path) == of_fork


def test_a_run_of_an_earlier_version_is_read_without_the_options_that_are_gone(tmp_path, capsys):
    hparams = resolved('train_policy', 'test', {'run.save_dir': str(tmp_path)})
    write(tmp_path, hparams)
    record = written(tmp_path)['run.json']
    record['train_policy']['settings']['run.keep_base'] = False
    (tmp_path / 'run.json').write_text(json.dumps(record))
    assert run_settings.load_run_hparams(str(tmp_path)).ppo == hparams.ppo
    assert capsys.readouterr().err.endswith('leaves alone: run.keep_base\n')
    again = resolved('train_policy', 'test', {'run.save_dir': str(tmp_path), 'run.resume': True})
    run_settings.check_settings(again, set())


def test_the_sizes_of_a_fork_are_read_and_written(tmp_path, capsys):
    sizes = {**gpt2.test_hparams().to_nested_dict(), 'sparse': True}
    (tmp_path / 'hparams.json').write_text(json.dumps(sizes))
    found = gpt2.load_hparams(str(tmp_path / 'hparams.json'))
    assert capsys.readouterr().err.endswith(' does not know and leaves alone: sparse\n')
    found.write(str(tmp_path))
    assert json.loads((tmp_path / 'hparams.json').read_text()) == sizes
