"""From a command line to a job (the original's utils/launch.py).

Experiments are resolved to hyperparameters, the user's settings laid over them, and jobs started on
one rank or several.
"""

import dataclasses
import os
import signal
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from lm_human_preferences import storage
from lm_human_preferences.commands.program import Command, completion, note
from lm_human_preferences.distributed import env, launcher, worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_dir, run_lock
from lm_human_preferences.utils import hyperparams, option_help
from lm_human_preferences.utils.arguments import did_you_mean
from lm_human_preferences.utils.combos import Trial
from lm_human_preferences.utils.hyperparams import group_class, members, option

if TYPE_CHECKING:
    from lm_human_preferences.hparams import train_policy, train_reward

    Training = train_policy.HParams | train_reward.HParams

Settings = TypeVar('Settings', bound=hyperparams.HParams)
Complete = Callable[[dict[str, Any], Any, str], dict[str, Any]]

LONGEST_NAME = 255
# The exit statuses of a job that a signal ended.
ENDED_BY_SIGNAL = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}


@dataclasses.dataclass
class RankHParams(hyperparams.HParams):
    """How many processes a job gets, and where."""

    mpi: int | None = option(
        None, 'ranks to start; None: one for every visible GPU, or 1 without', at_least=1
    )
    mode: str = option('local', "where to run: only 'local'")

    def validate(self, *, prefix: str = '') -> None:
        super().validate(prefix=prefix)
        if self.mode != 'local':
            raise ValueError(f"--{prefix}mode {self.mode} is not available: only 'local' is")


def validated(hparams: Settings) -> Settings:
    """`hparams`, checked: what its class finds wrong is a UserError."""
    try:
        hparams.validate()
    except (AssertionError, TypeError, ValueError) as e:
        raise UserError(str(e)) from e
    return hparams


# ---------------------------------------------------------------- starting a job


def start_job(
    job: str, arguments: dict[str, Any], mpi: int | None, *, has_ranks: bool = True
) -> None:
    """Call `job`, 'module:function', with keyword `arguments` on `mpi` ranks.

    mpi: None for one rank for each GPU. has_ranks: whether the job can share its work; else it is
    done by this process, or by the first of those that a launcher has started.
    """
    if 'VISIBLE_DEVICES' in os.environ:  # the variable that the original read
        os.environ.setdefault('CUDA_VISIBLE_DEVICES', os.environ['VISIBLE_DEVICES'])
    if not has_ranks:
        _do_alone(job, arguments)
        return
    size = _world_size(mpi)
    hparams: Any = arguments.get('hparams')
    is_training = hasattr(hparams, 'writes')

    def show_resume_hint() -> None:
        if is_training:
            note(run_dir.resume_hint(hparams))

    try:
        if env.launched_size() > 1:
            worker.run_job(job, arguments, at_interrupt=show_resume_hint)
        elif size > 1:
            if hasattr(hparams, 'check_ranks'):
                hparams.check_ranks(size)
            timeouts = hparams.run.timeouts if is_training else env.DEFAULT_TIMEOUTS
            launcher.launch_ranks(job, arguments, size, timeouts)
        else:
            worker.import_job(job)(**arguments)
    except KeyboardInterrupt:
        show_resume_hint()
        raise
    except SystemExit as e:
        if e.code in ENDED_BY_SIGNAL and is_training:
            run_lock.release(hparams.run.directory)
            show_resume_hint()
        raise


def _do_alone(job: str, arguments: dict[str, Any]) -> None:
    if env.launched_rank() > 0:
        return
    if env.launched_size() > 1:
        note(f'note: one of {env.launched_size()} ranks does all of this command')
    worker.import_job(job)(**arguments)


def _world_size(mpi: int | None) -> int:
    """How many ranks a job gets.

    As many as mpiexec, srun or torchrun has started; else `mpi`; else one for each GPU, or 1
    without.
    """
    if env.is_launched():
        launched = env.launched_size()
        if mpi not in (None, launched):
            raise UserError(
                f'--mpi {mpi}, but {launched} rank(s) were started by mpiexec, srun or torchrun:'
                ' leave --mpi out'
            )
        return launched
    if mpi is not None:
        return mpi
    return max(1, _visible_gpus())


def _visible_gpus() -> int:
    import torch  # takes seconds: only a job that starts pays for it

    return torch.cuda.device_count()


# ---------------------------------------------------------------- commands


def job_command(
    name: str,
    job: str,
    hparam_class: type[hyperparams.HParams] = hyperparams.HParams,
    arguments: Sequence[str] = (),
    **attrs: Any,
) -> Command:
    """The command `name ARGUMENT ... [--option value ...]`.

    It runs `job` with the arguments and options as keyword arguments, on one rank unless
    `hparam_class` has the options of RankHParams.
    """

    def start(settings: dict[str, Any], *values: str) -> None:
        """settings: the options that were given, by name; values: those of `arguments`."""
        hparams = hparam_class()
        override(hparams, settings)
        nested = validated(hparams).to_nested_dict()
        has_ranks = 'mpi' in nested
        mpi = nested.pop('mpi', 1)
        nested.pop('mode', None)
        job_arguments = {**dict(zip(arguments, values)), **nested}
        start_job(job, job_arguments, mpi, has_ranks=has_ranks)

    click_arguments = [click.Argument([key]) for key in arguments]
    return Command(name, start, hyperparams.fields(hparam_class), click_arguments, **attrs)


def _keep_settings(settings: dict[str, Any], hparams: Any, experiment: str) -> dict[str, Any]:
    """`settings`, for a command where nothing follows from them."""
    return settings


def experiment_command(
    name: str,
    job: str,
    hparam_class: 'type[Training]',
    experiments: Mapping[str, Sequence[Trial]],
    *,
    help: str,
    example: str = '',
    complete: Complete = _keep_settings,
) -> Command:
    """The command `name EXPERIMENT NAME [--option value ...]`.

    It runs `job` with an experiment's hyperparameters. experiments: name -> trials (see combos).
    complete(settings, hparams, experiment) returns the user's settings and what follows from them,
    given the experiment's hyperparameters.
    """
    experiment_launcher = ExperimentLauncher(name, job, hparam_class, experiments, complete)
    arguments = [
        click.Argument(['exp'], metavar='EXPERIMENT', shell_complete=completion(list(experiments))),
        click.Argument(['name']),
    ]
    return Command(
        name,
        experiment_launcher.launch,
        {**experiment_launcher.launch_fields, **settable(hparam_class)},
        arguments,
        positionals=('dry_run', 'mpi', 'mode', 'save_dir'),
        example=example,
        help=f"""{help}

\b
EXPERIMENT: {', '.join(experiments)}
NAME:       a name for this run, joined with --save_dir

An experiment sets what is [required] below and changes some of the defaults;
--dry_run shows all its settings.""",
    )


class Job(NamedTuple):
    """One trial of an experiment, resolved. explicitly_set: what the user set, by dotted name."""

    name: str
    binds: dict[str, Any]
    hparams: Any
    explicitly_set: dict[str, Any]


class ExperimentLauncher:
    """What `experiment_command` does when it is called; its arguments are described there."""

    def __init__(
        self,
        command: str,
        job: str,
        hparam_class: 'type[Training]',
        experiments: Mapping[str, Sequence[Trial]],
        complete: Complete,
    ) -> None:
        self.command = command
        self.job = job
        self.hparam_class = hparam_class
        self.experiments = experiments
        self.complete = complete
        self.launch_class = _launch_class(command)
        self.launch_fields = hyperparams.fields(self.launch_class)

    def launch(self, settings: dict[str, Any], exp: str, trial_name: str) -> None:
        """Resolve all trials of experiment `exp` before the first of them starts."""
        trials = self.experiments.get(exp)
        if trials is None:
            raise UserError(
                f'no experiment {exp!r} for {self.command}: choose from'
                f' {", ".join(self.experiments)}{did_you_mean(exp, self.experiments)}'
            )
        _check_name(trial_name)
        launch_settings = {key: settings.pop(key) for key in self.launch_fields if key in settings}
        launch: Any = validated(self.launch_class(**launch_settings))
        jobs = [
            self._resolve(trial, settings, exp, trial_name, launch.save_dir) for trial in trials
        ]
        if launch.save_dir and 'run.save_dir' in settings:
            note(
                'note: --run.save_dir has no effect: the run is kept in --save_dir joined with NAME'
            )
        if launch.dry_run:
            for job in jobs:
                _dry_run(job, launch)
        else:
            self._start(jobs, launch)

    def _resolve(
        self,
        trial: Trial,
        settings: dict[str, Any],
        exp: str,
        trial_name: str,
        save_dir: str | None,
    ) -> Job:
        binds, descriptor = read_trial(trial)
        hparams = self.hparam_class()
        hparams.override_from_dict(binds)
        explicitly_set = self.complete(settings, hparams, exp)
        override(hparams, explicitly_set)
        name = f'{trial_name}/{descriptor}'.rstrip('/')
        if save_dir:
            hparams.run.save_dir = storage.join(save_dir, name)
        return Job(name, binds, validated(hparams), explicitly_set)

    def _start(self, jobs: Sequence[Job], launch: Any) -> None:
        for job in jobs:
            run_dir.prepare_run_dir(
                job.hparams, overwrite=launch.overwrite, explicitly_set=job.explicitly_set
            )
        for job in jobs:
            mpi = launch.mpi
            if mpi is None and job.hparams.run.resume:
                mpi = run_dir.ranks_of(job.hparams.run.directory)
            start_job(self.job, {'hparams': job.hparams}, mpi)


def _launch_class(command: str) -> type[hyperparams.HParams]:
    """The options of the command itself, beside those of its experiment."""
    dry_run = option(
        False,
        'print all settings, make the checks that need no work, say what would start, and start'
        ' nothing',
    )
    save_dir = option(
        f'/tmp/save/{command}', 'parent folder: the run is saved in SAVE_DIR/NAME; None: not at all'
    )
    overwrite = option(
        False, 'delete what an earlier run of this NAME has written, and start again'
    )
    return dataclasses.make_dataclass(
        'LaunchHParams',
        bases=(RankHParams,),
        fields=[
            ('dry_run', bool, dry_run),
            ('save_dir', str | None, save_dir),
            ('overwrite', bool, overwrite),
        ],
    )


def _dry_run(job: Job, launch: Any) -> None:
    """Print the settings of `job`, check what can be checked without work, say what would start."""
    from lm_human_preferences.commands.dry_run import dry_run  # loads torch

    click.echo(f'{job.name}: {job.binds}')
    hyperparams.dump(job.hparams)
    for line in dry_run(job.hparams, _world_size(launch.mpi), launch.overwrite):
        note(line)


def _check_name(name: str) -> None:
    is_relative = not name.startswith('/') and '..' not in name.split('/')
    is_name = bool(name.strip('/')) and name.isprintable() and len(name) <= LONGEST_NAME
    if not (is_relative and is_name):
        raise UserError(
            f'NAME {name!r:.80} must be a relative path without .., of at most {LONGEST_NAME}'
            ' characters: it is joined to --save_dir'
        )


# ---------------------------------------------------------------- settings


def settable(hparam_class: type[hyperparams.HParams]) -> option_help.Fields:
    """The fields that are options on the command line: values, and groups that may be off."""
    return {
        key: field
        for key, field in hyperparams.fields(hparam_class).items()
        if not group_class(field.type) or types.NoneType in members(field.type)
    }


def read_trial(trial: Trial) -> tuple[dict[str, Any], str]:
    """What a trial binds, in its order, and the descriptors of its entries joined by dashes."""
    binds: dict[str, Any] = {}
    descriptors = []
    for var, value, extra in trial:
        if var in binds:
            note(f'WARNING: overriding key {var} from {binds[var]} to {value}')
        if var is not None:
            binds[var] = value
        if 'descriptor' in extra:
            descriptors.append(str(extra['descriptor']))
    return binds, '-'.join(descriptors)


def override(hparams: hyperparams.HParams, settings: Mapping[str, Any]) -> None:
    """Lay the user's `settings` {dotted name: value} over `hparams`.

    A leaf switches its group on; 'on' leaves a group that is on as it is.
    """
    settings = dict(settings)
    fields = settable(type(hparams))
    for group in [key for key, field in fields.items() if group_class(field.type)]:
        leaf = next((key for key in settings if key.startswith(f'{group}.')), None)
        if leaf and settings.get(group) == 'off':
            raise UserError(f'--{leaf} has no meaning with --{group} off: drop one of them')
        if leaf or settings.get(group) == 'on':
            settings[group] = 'on'
            if _is_on(hparams, group):
                del settings[group]
    hparams.override_from_dict(settings)


def _is_on(hparams: Any, group: str) -> bool:
    """Whether the group of that dotted name, and all that it is in, are there."""
    for part in group.split('.'):
        hparams = getattr(hparams, part, None)
    return hparams is not None
