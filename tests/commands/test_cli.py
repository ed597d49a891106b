"""Command line: values, mistakes, help and the jobs that it starts."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from command_line import (
    NEW,
    PUBLISHED,
    error_of,
    flat,
    hparams_of,
    invoke,
    succeed,
    told,
)
from experiments import resolved
from surroundings import SAVES

import launch
import lm_human_preferences
import sample
from lm_human_preferences import storage
from lm_human_preferences.cli import launch as jobs
from lm_human_preferences.cli import program, user_settings
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.hparams.command_options import SampleHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.runs import run_dir
from lm_human_preferences.utils.combos import bind, combos, each, label, options_shortdesc

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    'words, key, value',
    [
        ("--task.start_text='None'", 'task.start_text', 'None'),
        ('--task.start_text None', 'task.start_text', None),
    ],
)
def test_values(words, key, value, started):
    succeed(f'train_policy sentiment nm {words}')
    found = flat(hparams_of(started).to_nested_dict())[key]
    assert (type(found), str(found)) == (type(value), str(value))


@pytest.mark.parametrize(
    'experiment, words, token, text',
    [
        ('sentiment', '--task.policy.initial_model {}/of_gpt2', 13, None),
        ('sentiment', '--task.policy.initial_model {}/own', 13, '.'),
        ('tldr', '--task.policy.initial_model {}/run', 198, '\n'),
        ('sentiment', '--task.policy.initial_model someone/model', 13, '.'),
        ('sentiment', '--task.policy.initial_model {}/own --task.truncate_token 13', 13, None),
        ('sentiment', '--task.policy.initial_model {}/own --task.truncate_text !', 13, '!'),
    ],
)
def test_an_experiment_means_the_text_of_its_token(
    started, tmp_path, experiment, words, token, text
):
    (tmp_path / 'of_gpt2').mkdir()
    for folder in ('own', 'run/policy'):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / 'tokenizer.json').touch()
    succeed(f'train_policy {experiment} nm {words.format(tmp_path)}')
    hparams = hparams_of(started)
    for task in (hparams.task, hparams.rewards.train_new_model.task):
        assert (task.truncate_token, task.truncate_text) == (token, text)


@pytest.mark.parametrize(
    'given, expected',
    [({}, '.'), ({'task.truncate_token': 3}, None), ({'task.truncate_text': '!'}, '!')],
)
def test_a_token_that_users_name_goes_before_the_text_of_a_run(given, expected):
    task = TaskHParams(truncate_token=13, truncate_text='.')
    settings = user_settings.settings_with_own_token(given, task)
    assert settings.get('task.truncate_text', task.truncate_text) == expected


def test_number_at_the_end_without_a_value_is_1_and_says_so(started):
    """As recorded of the original."""
    result = invoke('train_policy sentiment nm --mpi 1 --ppo.lr')
    assert hparams_of(started).ppo.lr == 1.0
    assert result.stderr == 'note: --ppo.lr without a value means 1\n'


def test_leaf_switches_its_group_on(started):
    invoke('train_policy cnndm nm --rewards.adaptive_kl.target 6')
    found = hparams_of(started).rewards.adaptive_kl
    assert found == policy_options.AdaptiveKLParams(target=6.0)


def test_published_reward_model(started):
    result = invoke(f"train_policy descriptiveness nm --{NEW} 'off'")
    published = PUBLISHED.format('descriptiveness')
    assert hparams_of(started).rewards.trained_model == published
    note = f'note: no --rewards.trained_model given: using the published one, {published}\n'
    assert result.stderr == note


@pytest.mark.parametrize('asked', [f'--{NEW} --{NEW}.lr 1e-3', f'--{NEW}.lr 1e-3'])
def test_a_reward_model_that_an_experiment_lacks_is_that_of_train_reward(asked, started):
    task = '--task.policy.initial_model org/model --task.query_dataset reviews'
    task += ' --task.policy.lora.rank 4 --mpi 1 --save_dir None'
    succeed(f'train_reward chat nm {task} --labels.source test --lr 1e-3')
    succeed(f'train_policy chat nm {task} --{NEW}.labels.source test {asked}')
    alone, policy = (arguments['hparams'] for _, arguments, _ in started)
    new_model = policy.rewards.train_new_model
    assert policy.task == new_model.task
    assert flat(new_model.to_nested_dict()) == flat(alone.to_nested_dict())


NAMES = 'sentiment, descriptiveness, cnndm, tldr, test, mock_sentiment, chat'
COMMANDS = (
    'train_reward, train_policy, resume, export, doctor, evaluate, report, ask, import_labels,'
    ' label, labels, score'
)
MISTAKES = f"""
train_polic a b
    No such command 'train_polic'. Did you mean 'train_policy'? The command comes first: {COMMANDS}
--dry_run train_policy sentiment nm
    No such option '--dry_run'. The command comes first: {COMMANDS}
train_policy
    EXPERIMENT and NAME missing; see --help
train_policy sentimnt nm
    no experiment 'sentimnt' for train_policy: choose from {NAMES}
train_policy sentiment nm --ppo-lr=1
    No such option '--ppo-lr'. (Did you mean one of: '--ppo.cliprange', '--ppo.lam', '--ppo.lr'?)
train_policy sentiment nm --wxyz
    No such option '--wxyz'.
train_policy sentiment nm -ppo.lr=1e-6
    unexpected argument '-ppo.lr=1e-6': options are given as --name value, and a switch takes
    true, false, on or off
train_policy sentiment nm False 1 local /s more
    unexpected argument 'more': options are given as --name value, and a switch takes
    true, false, on or off
train_policy sentiment nm --run.evaluate maybe
    unexpected argument 'maybe': options are given as --name value, and a switch takes
    true, false, on or off
train_policy sentiment nm --task.query_prefix
    --task.query_prefix needs a value
train_policy sentiment nm --ppo.batch_size=inf
    --ppo.batch_size must be a whole number (int), got 'inf'
train_policy sentiment nm --ppo.whiten_rewards 0
    --ppo.whiten_rewards must be true or false, got '0'
train_policy sentiment nm --rewards.adaptive_kl=yes
    --rewards.adaptive_kl must be on or off or None, got 'yes'
train_policy sentiment nm --task.query_dataset None
    --task.query_dataset must be text (str), got 'None'
train_policy sentiment nm --mode slurm
    --mode slurm is none of local
train_policy sentiment nm --rewards.adaptive_kl off --rewards.adaptive_kl.target 3
    --rewards.adaptive_kl.target has no meaning with --rewards.adaptive_kl off: drop one of them
train_policy sentiment nm --rewards.trained_model /a
    give one reward: --rewards.trained_model DIRECTORY or --rewards.function FILE.py:FUNCTION, each
    with --{NEW} off, or --{NEW} on
train_policy sentiment nm --task.query_length 5 --{NEW}.task.query_length 6
    --task.query_length 5 and --{NEW}.task.query_length 6 differ, but a policy and
    its reward model share one task: give only one of them
"""


@pytest.mark.parametrize('argv, message', told(MISTAKES))
def test_mistakes(argv, message, started):
    assert error_of(invoke(argv)) == message
    assert not started


CONTRADICTIONS = """
train_reward test nm --labels.type best_of
    --labels.type 'best_of' is none of best_of_N
train_policy sentiment nm --rewards.adaptive_kl.horizon 100
    use a horizon above 102, or smaller batches
train_policy test nm --ppo.batch_size 32 --ppo.total_episodes 32 --rewards.adaptive_kl.horizon 1
    use a horizon above 6, or smaller batches
train_reward test nm --normalize_samples 1 --rollout_batch_size 1
    --normalize_samples 1 with --rollout_batch_size 1
"""


@pytest.mark.parametrize('argv, fact', told(CONTRADICTIONS))
def test_settings_that_contradict_each_other_are_named(argv, fact, started):
    assert fact in error_of(invoke(argv))
    assert not started


@pytest.mark.parametrize('name', ['/nm', 'a/../b', 'a/' * 3000 + 'b'])
def test_names_that_leave_the_folder_of_runs(name, started):
    told = error_of(invoke(f'train_policy sentiment {name}'))
    assert told.startswith(f'NAME {name!r:.80} must be a relative path') and not started


MISTAKES_OF_SAMPLING = """
sample
    give either --save_dir with a run of train_policy, such as /tmp/save/train_policy/first, or
    --model; options --task.NAME need --model
sample --save_dir x --prompt \udcff
    --prompt must be texts (str), got ('\\udcff',)
sample --save_dir x --output az://a/b/c.jsonl
    --output 'az://a/b/c.jsonl': give the name of a local file
sample --save_dir x --batch_size 2_000_000
    --batch_size must be at most 1000000, got 2000000
sample --save_dir x
    --save_dir x is not a run of train_policy: it has no train_policy_hparams.json
sample --model x
    --model needs --prompt, --queries or --task.query_dataset
"""


@pytest.mark.parametrize('argv, message', told(MISTAKES_OF_SAMPLING))
def test_mistakes_of_sampling(argv, message, started):
    assert error_of(invoke(argv, sample.cli)) == message
    assert not started


@pytest.mark.parametrize(
    'words, save_dir',
    [
        ('nm', 'USUAL/train_reward/nm'),
        ('a/b --save_dir /s', '/s/a/b'),
        ('nm --save_dir az://account/box', 'az://account/box/nm'),
        ('nm --save_dir None', None),
    ],
)
def test_save_dir(words, save_dir, started, monkeypatch):
    monkeypatch.setattr(run_dir, 'prepare_run_dir', lambda *_, **__: None)  # it asks the store
    result = invoke(f'train_reward sentiment {words}')
    wanted = save_dir and save_dir.replace('USUAL', SAVES)
    assert (hparams_of(started).run.save_dir, result.stderr) == (wanted, '')


@pytest.mark.parametrize('words, is_saved', [('', True), (' --save_dir None', False)])
def test_run_save_dir_is_overruled_and_says_so(words, is_saved, started):
    result = invoke(f'train_reward sentiment nm --run.save_dir /q{words}')
    usual = f'{SAVES}/train_reward/nm'
    assert hparams_of(started).run.save_dir == (usual if is_saved else None)
    assert result.stderr.startswith('note: --run.save_dir has no effect: ')


def train(trials, words='sweep nm --save_dir /q', hparam_class=reward_options.CommandHParams):
    command = jobs.experiment_command('train', hparam_class, {'sweep': trials}, help='Train.')
    return invoke(f'train {words}', program.Program(commands=[command]))


def test_a_field_that_a_fork_has_added_is_an_option(started):
    @dataclasses.dataclass
    class HParams(reward_options.CommandHParams):
        task_id: str | None = None

    test = launch.reward_experiments['test']
    train(test, 'sweep nm --task_id x7', HParams)
    assert hparams_of(started).task_id == 'x7'
    assert '--task_id TEXT|None' in train(test, '--help', HParams).stdout


def test_a_key_that_an_experiment_sets_twice_is_noted(started):
    result = train(combos(launch.reward_experiments['test'], bind('lr', 0.5)))
    assert hparams_of(started).lr == 0.5
    assert result.stderr == 'WARNING: overriding key lr from 0.001 to 0.5\n'


def test_descriptors_of_a_trial_are_a_part_of_the_name_of_its_run(started, monkeypatch):
    test = launch.reward_experiments['test']
    train(combos(test, label('a'), options_shortdesc('batch_size', 'b', [16])))
    assert hparams_of(started).run.save_dir == '/q/nm/a-b16'
    several = train(combos(test, each(label('a'), label('b'))))
    assert error_of(several).startswith("experiment 'sweep' has 2 trials: list each of them")


@pytest.fixture
def job(monkeypatch):
    calls = []
    module = types.SimpleNamespace(train=lambda **given: calls.append(given))
    monkeypatch.setitem(sys.modules, 'lm_human_preferences.fakejob', module)
    return calls


@pytest.mark.parametrize('mpi, gpus, ranks', [(1, 8, 1), (None, 0, 1), (2, 0, 2), (None, 8, 8)])
def test_one_rank_runs_here_and_several_are_launched(job, monkeypatch, mpi, gpus, ranks):
    launched = []
    monkeypatch.setattr(jobs.launch_methods, 'become_mpiexec', launched.append)
    cuda = types.SimpleNamespace(device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, 'torch', types.SimpleNamespace(cuda=cuda))
    jobs.start_job('fakejob:train', {'hparams': 3}, mpi)
    assert (job, launched) == (([{'hparams': 3}], []) if ranks == 1 else ([], [ranks]))


@pytest.mark.parametrize(
    'environment, visible',
    [
        ({'VISIBLE_DEVICES': '1,2'}, '1,2'),
        ({'VISIBLE_DEVICES': '1', 'CUDA_VISIBLE_DEVICES': ''}, ''),
    ],
)
def test_visible_devices(job, monkeypatch, environment, visible):
    """Original-defects 29, and the name of the variable that it read instead."""
    for name in ('VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES'):
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    jobs.start_job('fakejob:train', {}, 1)
    assert os.environ.get('CUDA_VISIBLE_DEVICES') == visible


def failing(error):
    def train(settings):
        raise error

    return program.Program(commands=[program.Command('train', train, {})])


def test_mistakes_found_by_a_job_are_one_line():
    cli = failing(storage.NotFound('/labels.json\nis not there'))
    assert error_of(invoke('train', cli)) == '/labels.json is not there'


@pytest.mark.parametrize('error', [ValueError('ours'), KeyError('x')])
def test_our_own_errors_keep_their_traceback(error):
    assert invoke('train', failing(error)).exception is error


def test_interrupt_is_quiet():
    result = invoke('train', failing(KeyboardInterrupt()))
    assert (result.exit_code, result.output.strip()) == (130, '')


@pytest.fixture
def run(tmp_path):
    settings = resolved('train_policy', 'test').to_nested_dict()
    (tmp_path / 'train_policy_hparams.json').write_text(json.dumps(settings))
    return str(tmp_path)


def test_sample(started, run):
    words = f'sample --save-dir {run} --temperature=0.5 --nsamples 6 --mpi 1 --seed 3'
    succeed(words, sample.cli)
    options = SampleHParams(save_dir=run, temperature=0.5, nsamples=6, mpi=1, seed=3)
    assert started == [('commands.sample_policy:sample_policy', {'options': options}, 1)]


def test_prompts_are_taken_as_they_are(started, run):
    prompts = ['--prompt', '"5"', '--prompt=None', '--prompt=', '--prompt', ' a = b']
    succeed(['sample', f'--save_dir={run}', *prompts], sample.cli)
    ((_, arguments, _),) = started
    assert arguments['options'].prompt == ('"5"', 'None', '', ' a = b')


def test_help_lists_every_option():
    text = invoke('train_policy --help').stdout
    unbroken = ''.join(text.split())
    assert f'EXPERIMENT:\n    {", ".join(launch.policy_experiments)}\n' in text
    for key, field in user_settings.settable(policy_options.HParams).items():
        is_shown = not key.startswith(f'{NEW}.')
        assert (f' --{key} ' in text) == is_shown
        assert not is_shown or ''.join(field.metadata['help'].split()) in unbroken


OF_TASK = 'Launching, Run, Task, Policy, Adapters'
OF_REWARD = 'Labels, Reward training, Adapters of a reward model'
OF_POLICY = 'Rewards, Adaptive KL, Online labels, Page for labellers, PPO'


@pytest.mark.parametrize(
    'command, headings',
    [
        ('train_policy', f'{OF_TASK}, {OF_POLICY}'),
        ('train_reward', f'{OF_TASK}, {OF_REWARD}'),
        ('resume', f'{OF_TASK}, {OF_REWARD}, {OF_POLICY}'),
        ('evaluate', 'Options'),
    ],
)
def test_help_has_sections(command, headings):
    found = re.findall(r'^([A-Z][A-Za-z ]*):$', invoke(f'{command} --help').stdout, re.MULTILINE)
    assert ', '.join(found) == f'{headings}, Help'


PAGES = [(cli, words) for cli in (launch.cli, sample.cli) for words in ('', *cli.commands)]


@pytest.mark.parametrize('cli, words', PAGES)
def test_help_fits_a_terminal_of_80_columns(cli, words, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    text = invoke(f'{words} --help', cli).stdout
    assert len(text.splitlines()) > 5
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert text.isascii()
    assert '\\x' not in text  # as control characters are shown: a mark of click for a paragraph


def test_every_command_has_an_example_that_it_understands(started, monkeypatch):
    for name, command in launch.cli.commands.items():
        script, first, *args = command.example.split()
        assert (script, first) == ('./launch.py', name)
        assert f'  Example:\n    {command.example}\n' in invoke(f'{name} --help').stdout
        command.make_context(name, args)


def test_version():
    expected = f'lm-human-preferences {lm_human_preferences.__version__}\n'
    assert succeed('--version').stdout == expected


@pytest.mark.parametrize('words', ['sentiment -h', '--xyz --help'])
def test_help_among_other_words(words):
    assert invoke(f'train_policy {words}').stdout == invoke('train_policy --help').stdout
    assert invoke('').stdout == invoke('-h').stdout == invoke('--help').stdout


@pytest.mark.parametrize(
    'words, completions',
    [
        ('tr', ['train_policy', 'train_reward']),
        ('train_policy sentiment nm --ppo.cliprange_', ['--ppo.cliprange_value']),
        ('train_policy x y --rewards.train_new_model.lr', ['--rewards.train_new_model.lr']),
    ],
)
def test_shell_completion(words, completions):
    *before, last = words.split()
    shell = ShellComplete(launch.cli, {}, 'launch.py', '_LAUNCH_PY_COMPLETE')
    assert [item.value for item in shell.get_completions(before, last)] == completions


def test_help_loads_nothing_heavy():
    heavy = 'torch', 'numpy', 'transformers', 'tensorboard', 'blobfile', 'mpi4py', 'huggingface_hub'
    code = (
        'import sys, launch\ntry:\n    launch.cli(["train_policy", "--help"])\nfinally:\n'
        f'    print("HEAVY", [m for m in {heavy} if m in sys.modules])'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == 'HEAVY []'
