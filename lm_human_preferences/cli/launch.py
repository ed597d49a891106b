"""From a command line to a job (the original's utils/launch.py).

Experiments are resolved to hyperparameters, the user's settings laid over them, and jobs started on
one rank or several.
"""

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from lm_human_preferences import shell, storage
from lm_human_preferences.cli.arguments import did_you_mean
from lm_human_preferences.cli.job_names import JobName
from lm_human_preferences.cli.program import Command, completion
from lm_human_preferences.cli.user_settings import (
    override,
    read_trial,
    settable,
    with_end_of_response,
)
from lm_human_preferences.distributed import launch_methods, launcher, waiting, worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.run_story import commands
from lm_human_preferences.runs import run_dir, run_files, run_lock
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.combos import Trial
from lm_human_preferences.utils.hyperparams import option
from lm_human_preferences.utils.streams import note

if TYPE_CHECKING:
    from lm_human_preferences.hparams import policy_options, reward_options

    Training = policy_options.HParams | reward_options.HParams

Settings = TypeVar('Settings', bound=hyperparams.HParams)
Complete = Callable[[dict[str, Any], Any, str], tuple[dict[str, Any], list[str]]]

LONGEST_NAME = 255
# The exit statuses of a job that a signal ended.
ENDED_BY_SIGNAL = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}


@dataclasses.dataclass
class RankHParams(hyperparams.HParams):
    """How many processes a job gets, and where."""

    mpi: int | None = option(
        None, 'ranks to start; None: one for every visible GPU, or 1 without', at_least=1
    )
    mode: str = option('local', help=None)  # the original has it, with this one value

    def validate(self) -> None:
        """Also ValueError for a mode that this program does not have."""
        super().validate()
        if self.mode != 'local':
            raise ValueError(
                f"{self.option_name('mode')} {self.mode} is not available: only 'local' is"
            )


def validated(hparams: Settings) -> Settings:
    """`hparams`, checked: what its class finds wrong is a UserError."""
    try:
        hparams.validate()
    except (AssertionError, TypeError, ValueError) as e:
        raise UserError(str(e)) from e
    return hparams


# ---------------------------------------------------------------- starting a job


def start_job(
    job: JobName, arguments: dict[str, Any], mpi: int | None, *, has_ranks: bool = True
) -> None:
    """Call `job` with keyword `arguments` on `mpi` ranks.

    mpi: None for one rank for each GPU. has_ranks: whether the job can share its work; else it is
    done by this process, or by the first of those that a launcher has started.
    """
    if 'VISIBLE_DEVICES' in os.environ:  # the variable that the original read
        os.environ.setdefault('CUDA_VISIBLE_DEVICES', os.environ['VISIBLE_DEVICES'])
    if not has_ranks:
        _do_alone(job, arguments)
        return
    shell.require('torch')  # ranks would look for mpiexec first
    size = _world_size(mpi)
    hparams: Any = arguments.get('hparams')
    is_training = hasattr(hparams, 'writes')

    def show_resume_hint() -> None:
        if is_training:
            note(run_dir.resume_hint(hparams))

    try:
        if launch_methods.current().size > 1:
            worker.run_job(job, arguments, at_interrupt=show_resume_hint)
        elif size > 1:
            if hasattr(hparams, 'check_ranks'):
                hparams.check_ranks(size)
            timeouts = hparams.run.timeouts if is_training else waiting.DEFAULT_TIMEOUTS
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


def _do_alone(job: JobName, arguments: dict[str, Any]) -> None:
    launched = launch_methods.current()
    if launched.rank > 0:
        return
    if launched.size > 1:
        note(f'note: one of {launched.size} ranks does all of this command')
    worker.import_job(job)(**arguments)


def _world_size(mpi: int | None) -> int:
    """How many ranks a job gets.

    As many as mpiexec, srun or torchrun has started; else `mpi`; else one for each GPU, or 1
    without.
    """
    launched = launch_methods.current()
    if launched.decides_size:
        if mpi not in (None, launched.size):
            raise UserError(
                f'--mpi {mpi}, but {launched.size} rank(s) were started by mpiexec, srun or'
                ' torchrun: leave --mpi out'
            )
        return launched.size
    if mpi is not None:
        return mpi
    return max(1, _visible_gpus())


def _visible_gpus() -> int:
    # It takes seconds to import: only a job that starts pays for it.
    torch = worker.import_for_good('torch')
    return torch.cuda.device_count()


# ---------------------------------------------------------------- commands


def job_command(
    name: str,
    job: JobName,
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


def _keep_settings(
    settings: dict[str, Any], hparams: Any, experiment: str
) -> tuple[dict[str, Any], list[str]]:
    """`settings`, for a command where nothing follows from them."""
    return settings, []


def experiment_command(
    name: str,
    job: JobName,
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
    given the experiment's hyperparameters, and lines that tell the user of it.
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

    experiment: str
    name: str
    binds: dict[str, Any]
    hparams: Any
    explicitly_set: dict[str, Any]


class ExperimentLauncher:
    """What `experiment_command` does when it is called; its arguments are described there."""

    def __init__(
        self,
        command: str,
        job: JobName,
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
        if _nothing_is_saved(settings):
            settings.pop('run.save_dir', None)
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
        settings = with_end_of_response(settings, hparams.task)
        explicitly_set, notes = self.complete(settings, hparams, exp)
        for line in notes:
            note(line)
        override(hparams, explicitly_set)
        name = f'{trial_name}/{descriptor}'.rstrip('/')
        if save_dir:
            hparams.run.save_dir = storage.join(save_dir, name)
        return Job(exp, name, binds, validated(hparams), explicitly_set)

    def _start(self, jobs: Sequence[Job], launch: Any) -> None:
        for job in jobs:
            run_dir.prepare_run_dir(
                job.hparams, overwrite=launch.overwrite, explicitly_set=job.explicitly_set
            )
        for job in jobs:
            mpi = launch.mpi
            if mpi is None and job.hparams.run.resume:
                mpi = run_dir.ranks_of(job.hparams.run.directory)
            arguments = training_arguments(job.hparams, job.experiment, job.binds)
            start_job(self.job, arguments, mpi)


def training_arguments(
    hparams: 'Training', experiment: str | None, binds: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the job that trains with `hparams`.

    binds: what the experiment sets; nothing where it is not known.
    """
    arguments: dict[str, Any] = {'hparams': hparams, 'experiment': experiment}
    if hparams.writes()[-1] == run_files.REWARD.command:
        options = commands.differences(hparams, binds)
        arguments['task_options'] = {
            name: value for name, value in options.items() if name.startswith('task.')
        }
    return arguments


def _nothing_is_saved(settings: Mapping[str, Any]) -> bool:
    """Whether --save_dir None is the last that `settings`, in their order, say of a directory."""
    given = [key for key in settings if key in ('save_dir', 'run.save_dir')]
    return given[-1:] == ['save_dir'] and not settings['save_dir']


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
    dry_run = worker.import_job('lm_human_preferences.commands.dry_run:dry_run')  # loads torch
    click.echo(f'{job.name}: {job.binds}')
    hyperparams.dump(job.hparams)
    hyperparams.dump_additions(job.hparams)
    lines = dry_run(job.hparams, _world_size(launch.mpi), launch.overwrite, job.explicitly_set)
    for line in lines:
        note(line)


def _check_name(name: str) -> None:
    is_relative = not name.startswith('/') and '..' not in name.split('/')
    is_name = bool(name.strip('/')) and name.isprintable() and len(name) <= LONGEST_NAME
    if not (is_relative and is_name):
        raise UserError(
            f'NAME {name!r:.80} must be a relative path without .., of at most {LONGEST_NAME}'
            ' characters: it is joined to --save_dir'
        )
