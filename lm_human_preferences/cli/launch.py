"""Commands that start jobs, such as a training (the original's utils/launch.py)."""

import dataclasses
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lm_human_preferences import errors, storage
from lm_human_preferences.cli import user_settings
from lm_human_preferences.cli.program import Command
from lm_human_preferences.distributed import launch_methods, worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.command_options import RankHParams
from lm_human_preferences.hparams.policy_options import task_options
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


@dataclasses.dataclass
class _LaunchHParams(RankHParams):
    dry_run: bool = option(
        False,
        'print all settings, make the checks that need no work, say what would start, and start'
        ' nothing',
    )
    overwrite: bool = option(
        False, 'delete what an earlier run of this NAME has written, and start again'
    )


def validated(hparams: Settings) -> Settings:
    """Return `hparams` if they are valid; otherwise raise UserError."""
    try:
        hparams.validate()
    except (TypeError, ValueError) as invalid_setting:
        raise UserError(str(invalid_setting)) from invalid_setting
    return hparams


# ---------------------------------------------------------------- starting a job


def start_job(
    job: str, arguments: dict[str, Any], mpi: int | None, *, has_ranks: bool = True
) -> None:
    """Call `job`, a 'module:function' of this package, on `mpi` ranks (None: one for each GPU).

    has_ranks: if False, the job ignores `mpi` and runs in one process.
    """
    if 'VISIBLE_DEVICES' in os.environ:  # the original program's name for CUDA_VISIBLE_DEVICES
        os.environ.setdefault('CUDA_VISIBLE_DEVICES', os.environ['VISIBLE_DEVICES'])
    launch = launch_methods.current()
    if not has_ranks:
        if launch.rank == 0:
            import_job(job)(**arguments)
        return
    errors.require('torch')  # report missing torch before a missing mpiexec
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
    return getattr(import_for_good(f'lm_human_preferences.{module}'), name)


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
    """Return the number of ranks: the launcher's, else `mpi`, else that of GPUs (at least 1)."""
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


def job_command(
    name: str,
    job: str,
    options: type[hyperparams.HParams] = hyperparams.HParams,
    arguments: Sequence[str | click.Argument] = (),
    *,
    more: Callable[[], dict[str, Any]] = dict,
    **attrs: Any,
) -> Command:
    """Return the command `name ARGUMENT ... [--option ...]`, which starts `job`.

    The job gets as keyword arguments: the options, the arguments, and what `more` returns.
    """
    names = [each if isinstance(each, str) else str(each.name) for each in arguments]

    def start(settings: dict[str, Any], *values: Any) -> None:
        """Start `job` with the user's `settings` {option: value} and the `values` of arguments."""
        own = options()
        user_settings.override(own, settings)
        given = {**dict(zip(names, values, strict=True)), **more()}
        start_job(job, given | validated(own).to_nested_dict(), mpi=1, has_ranks=False)

    return Command(name, start, user_settings.settable(options), arguments, **attrs)


def experiment_command(
    name: str,
    hparam_class: 'type[Training]',
    experiments: Mapping[str, Sequence[Trial]],
    *,
    help: str,
    example: str = '',
    complete: Complete | None = None,
) -> Command:
    """Return the command `name EXPERIMENT NAME`. complete: function that adds implied settings."""
    launch_class = _launch_class(name)
    launch_fields = hyperparams.fields(launch_class)

    def start(settings: dict[str, Any], exp: str, name_of_run: str) -> None:
        """Start the training, or print what would start."""
        binds = user_settings.bindings(experiments, exp, name)
        name_of_run = _checked_name(user_settings.run_name(name_of_run, experiments[exp][0]))
        launch_settings = {key: settings.pop(key) for key in launch_fields if key in settings}
        launch: Any = validated(launch_class(**launch_settings))
        hparams = hparam_class()
        hparams.override_from_dict(binds)
        settings = user_settings.with_end_of_response(settings, hparams.task)
        if complete is not None:
            settings = complete(settings, hparams, exp)
        user_settings.override(hparams, settings)
        if 'run.save_dir' in settings:
            note(_NO_EFFECT)
        parent = launch.save_dir and storage.absolute(launch.save_dir)
        hparams.run.save_dir = parent and storage.join(parent, name_of_run)
        validated(hparams)
        if launch.dry_run:
            _dry_run(f'{name_of_run}: {binds}', hparams, launch, settings)
            return
        run_dir.prepare_run_dir(hparams, overwrite=launch.overwrite, explicitly_set=settings)
        mpi = launch.mpi
        if mpi is None and hparams.run.resume:
            mpi = run_dir.ranks_of(hparams.run.directory)
        start_training(hparams, exp, binds, mpi)

    experiment = click.Argument(['exp'], metavar='EXPERIMENT')
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


def start_training(
    hparams: 'Training', experiment: str | None, binds: Mapping[str, Any], mpi: int | None
) -> None:
    """Start a training run on `mpi` ranks. binds: settings of the experiment, or {}."""
    arguments: dict[str, Any] = {'hparams': hparams, 'experiment': experiment}
    if hparams.command == run_files.REWARD.command:
        arguments['task_options'] = task_options(hparams.task, binds)
    start_job(f'{hparams.command}:train', arguments, mpi)


def _launch_class(command: str) -> type[_LaunchHParams]:
    """Return the class of a training command's launch options, such as --mpi and --save_dir."""
    save_dir = option(
        run_files.usual_directory(command),
        'parent folder: the run is saved in SAVE_DIR/NAME; None: not at all',
        path=True,
    )
    fields = [('save_dir', str | None, save_dir)]
    return dataclasses.make_dataclass('LaunchHParams', fields, bases=(_LaunchHParams,))


def _dry_run(title: str, hparams: Any, launch: Any, explicitly_set: dict[str, Any]) -> None:
    """Print the settings of a run, check them without training, and print what would start."""
    dry_run = import_job('commands.dry_run:dry_run')  # this import loads torch
    click.echo(title)
    hyperparams.dump(hparams)
    hyperparams.dump_additions(hparams)
    for line in dry_run(hparams, _world_size(launch.mpi), launch.overwrite, explicitly_set):
        note(line)


def _checked_name(name: str) -> str:
    """Return the NAME of a run without trailing slashes; UserError if it is not allowed."""
    is_relative = not name.startswith('/') and '..' not in name.split('/')
    # The bytes of a run's NAME are decoded as UTF-8 in every locale.
    letters = os.fsencode(name).decode(errors='surrogateescape')
    is_name = bool(name.strip('/')) and letters.isprintable() and len(letters) <= LONGEST_NAME
    if not (is_relative and is_name):
        raise UserError(
            f'NAME {name!r:.80} must be a relative path without .., of at most {LONGEST_NAME}'
            ' characters: it is joined to --save_dir'
        )
    return name.rstrip('/')
