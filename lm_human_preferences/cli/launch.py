"""Commands that start jobs, such as a training (the original's utils/launch.py)."""

import dataclasses
import enum
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lm_human_preferences import shell, storage
from lm_human_preferences.cli import user_settings
from lm_human_preferences.cli.program import Command, completion
from lm_human_preferences.distributed import launch_methods, worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.differences import task_options
from lm_human_preferences.runs import run_dir, run_files
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.combos import Trial
from lm_human_preferences.utils.hyperparams import option
from lm_human_preferences.utils.streams import note

if TYPE_CHECKING:
    from lm_human_preferences.hparams.policy_options import Training

Settings = TypeVar('Settings', bound=hyperparams.HParams)
Complete = Callable[[dict[str, Any], Any, str], dict[str, Any]]

LONGEST_NAME = 255
_NO_EFFECT = 'note: --run.save_dir has no effect: the run is kept in --save_dir joined with NAME'


class JobName(enum.StrEnum):
    """Jobs as 'module:function': texts, since importing the function would load torch."""

    TRAIN_REWARD = 'lm_human_preferences.train_reward:train'
    TRAIN_POLICY = 'lm_human_preferences.train_policy:train'
    SAMPLE = 'lm_human_preferences.commands.sample_policy:sample_policy'
    EXPORT = 'lm_human_preferences.commands.export_model:export'
    DOCTOR = 'lm_human_preferences.commands.doctor:doctor'
    EVALUATE = 'lm_human_preferences.evaluation.evaluate:evaluate'
    REPORT = 'lm_human_preferences.report.page:write_report'
    ASK = 'lm_human_preferences.commands.ask:ask'
    IMPORT_LABELS = 'lm_human_preferences.commands.texts.import_labels:import_labels'
    LABEL = 'lm_human_preferences.commands.answer_questions:label'
    LABELS = 'lm_human_preferences.commands.report_labels:report_labels'
    SCORE = 'lm_human_preferences.commands.texts.score:score'


@dataclasses.dataclass
class RankHParams(hyperparams.HParams):
    """Number of ranks of a job, and where they run."""

    mpi: int | None = option(
        None, 'ranks to start; None: one for each visible GPU, or 1', at_least=1
    )
    mode: str = option('local', help=None, one_of=('local',))  # as in the original


def validated(hparams: Settings) -> Settings:
    """Return `hparams`; UserError if its class finds a problem."""
    try:
        hparams.validate()
    except (TypeError, ValueError) as e:
        raise UserError(str(e)) from e
    return hparams


# ---------------------------------------------------------------- starting a job


def start_job(
    job: JobName, arguments: dict[str, Any], mpi: int | None, *, has_ranks: bool = True
) -> None:
    """Call `job` on `mpi` ranks (None: one for each GPU), or without ranks in one process."""
    if 'VISIBLE_DEVICES' in os.environ:  # the variable that the original read
        os.environ.setdefault('CUDA_VISIBLE_DEVICES', os.environ['VISIBLE_DEVICES'])
    launch = launch_methods.current()
    if not has_ranks:
        if launch.rank == 0:
            if launch.size > 1:
                note(f'note: one of {launch.size} ranks does all of this command')
            import_job(job)(**arguments)
        return
    shell.require('torch')  # else a missing mpiexec would be reported first
    size = _world_size(mpi)
    hparams: Any = arguments.get('hparams')
    is_training = hasattr(hparams, 'commands')

    def show_resume_hint() -> None:
        if is_training:
            note(run_dir.resume_hint(hparams))

    try:
        if launch.size > 1:
            worker.run_job(lambda: import_job(job), arguments, show_resume_hint)
        elif size > 1:
            if is_training:
                hparams.check_ranks(size)
            launch_methods.become_mpiexec(size)
        else:
            import_job(job)(**arguments)
    except KeyboardInterrupt:
        show_resume_hint()
        raise


def import_job(job: str) -> Callable[..., Any]:
    """Return the function that 'module:function' names."""
    module, name = job.split(':')
    return getattr(import_for_good(module), name)


def import_for_good(module: str) -> Any:
    """Import a module; exempt its objects from garbage collection, to save half a second."""
    if module in sys.modules:
        return sys.modules[module]
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _world_size(mpi: int | None) -> int:
    """Return the number of ranks: the launcher's, else `mpi`, else one for each GPU, or 1."""
    launch = launch_methods.current()
    if launch.decides_size:
        if mpi not in (None, launch.size):
            raise UserError(
                f'--mpi {mpi}, but {launch.size} rank(s) were started by mpiexec, srun or'
                ' torchrun: leave --mpi out'
            )
        return launch.size
    if mpi is not None:
        return mpi
    # Importing torch takes seconds, so it is put off until here.
    torch = import_for_good('torch')
    return max(1, torch.cuda.device_count())


# ---------------------------------------------------------------- commands


@dataclasses.dataclass(frozen=True)
class Job:
    """Job that a command starts, passing its options and arguments as keyword arguments.

    check(*arguments): called before torch is loaded. more: returns further keyword arguments.
    """

    name: JobName
    options: type[hyperparams.HParams] = hyperparams.HParams
    arguments: Sequence[str | click.Argument] = ()
    check: Callable[..., object] | None = None
    more: Callable[[], dict[str, Any]] = dict

    def start(self, settings: dict[str, Any], *values: Any) -> None:
        """Start the job. settings: {option: value}, as given. values: one for each argument."""
        options = self.options()
        user_settings.override(options, settings)
        nested = validated(options).to_nested_dict()
        if self.check is not None:
            self.check(*values)
        has_ranks = 'mpi' in nested
        mpi = nested.pop('mpi', 1)
        nested.pop('mode', None)
        names = [each if isinstance(each, str) else str(each.name) for each in self.arguments]
        arguments = dict(zip(names, values, strict=True))
        arguments |= self.more()
        arguments |= nested
        start_job(self.name, arguments, mpi, has_ranks=has_ranks)

    def command(self, name: str, **attrs: Any) -> Command:
        """Return the command `name ARGUMENT ... [--option ...]`. attrs: passed on to Command."""
        fields = user_settings.settable(self.options)
        return Command(name, self.start, fields, self.arguments, **attrs)


def experiment_command(
    name: str,
    job: JobName,
    hparam_class: 'type[Training]',
    experiments: Mapping[str, Sequence[Trial]],
    *,
    help: str,
    example: str = '',
    complete: Complete | None = None,
) -> Command:
    """Return the command `name EXPERIMENT NAME [--option ...]`. complete: adds implied settings."""
    launch_class = _launch_class(name)
    launch_fields = hyperparams.fields(launch_class)

    def start(settings: dict[str, Any], exp: str, name_of_run: str) -> None:
        """Start the training, or print what would start."""
        binds = user_settings.bindings(experiments, exp, name)
        name_of_run = _checked_name(user_settings.run_name(name_of_run, experiments[exp][0]))
        launch_settings = {key: settings.pop(key) for key in launch_fields if key in settings}
        launch: Any = validated(launch_class(**launch_settings))
        hparams = hparam_class()
        settings = _resolve(hparams, binds, settings, exp, complete)
        if launch.save_dir:
            hparams.run.save_dir = storage.join(storage.absolute(launch.save_dir), name_of_run)
            if 'run.save_dir' in settings:
                note(_NO_EFFECT)
        validated(hparams)
        if launch.dry_run:
            _dry_run(f'{name_of_run}: {binds}', hparams, launch, settings)
            return
        run_dir.prepare_run_dir(hparams, overwrite=launch.overwrite, explicitly_set=settings)
        mpi = launch.mpi
        if mpi is None and hparams.run.resume:
            mpi = run_dir.ranks_of(hparams.run.directory)
        start_job(job, training_arguments(hparams, exp, binds), mpi)

    complete_word = completion(list(experiments))
    experiment = click.Argument(['exp'], metavar='EXPERIMENT', shell_complete=complete_word)
    return Command(
        name,
        start,
        {**launch_fields, **user_settings.settable(hparam_class)},
        [experiment, click.Argument(['name'])],
        positionals=('dry_run', 'mpi', 'mode', 'save_dir'),
        example=example,
        help=f"""{help}

\b
EXPERIMENT:
  {', '.join(experiments)}
NAME:
  a name for this run, joined with --save_dir

An experiment sets what is [required] below (chat: but for model and queries)
and changes some of the defaults; --dry_run shows all its settings.""",
    )


def _resolve(
    hparams: Any,
    binds: dict[str, Any],
    settings: dict[str, Any],
    experiment: str,
    complete: Complete | None,
) -> dict[str, Any]:
    """Set `hparams` to the experiment's, then the user's settings; return the latter, completed."""
    hparams.override_from_dict(binds)
    settings = user_settings.with_end_of_response(settings, hparams.task)
    if complete is not None:
        settings = complete(settings, hparams, experiment)
    user_settings.override(hparams, settings)
    return settings


def training_arguments(
    hparams: 'Training', experiment: str | None, binds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return {name: argument} of a training's job. binds: the experiment's settings, or {}."""
    arguments: dict[str, Any] = {'hparams': hparams, 'experiment': experiment}
    if hparams.command == run_files.REWARD.command:
        arguments['task_options'] = task_options(hparams.task, binds)
    return arguments


def _launch_class(command: str) -> type[hyperparams.HParams]:
    """Return the class of the options that launch a command, such as --mpi and --dry_run."""
    dry_run = option(
        False,
        'print all settings, make the checks that need no work, say what would start, and start'
        ' nothing',
    )
    save_dir = option(
        run_files.usual_directory(command),
        'parent folder: the run is saved in SAVE_DIR/NAME; None: not at all',
        path=True,
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


def _dry_run(title: str, hparams: Any, launch: Any, explicitly_set: dict[str, Any]) -> None:
    """Print the settings of a run, check them without training, and print what would start."""
    dry_run = import_job('lm_human_preferences.commands.dry_run:dry_run')  # loads torch
    click.echo(title)
    hyperparams.dump(hparams)
    hyperparams.dump_additions(hparams)
    for line in dry_run(hparams, _world_size(launch.mpi), launch.overwrite, explicitly_set):
        note(line)


def _checked_name(name: str) -> str:
    """Return the NAME of a run without trailing slashes; UserError if it is not allowed."""
    is_relative = not name.startswith('/') and '..' not in name.split('/')
    letters = os.fsencode(name).decode(errors='surrogateescape')  # as UTF-8 in every locale
    is_name = bool(name.strip('/')) and letters.isprintable() and len(letters) <= LONGEST_NAME
    if not (is_relative and is_name):
        raise UserError(
            f'NAME {name!r:.80} must be a relative path without .., of at most {LONGEST_NAME}'
            ' characters: it is joined to --save_dir'
        )
    return name.rstrip('/')
