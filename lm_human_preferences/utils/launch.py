"""The commands: click options from hyperparameter classes, experiments resolved with them, jobs
started."""

import dataclasses
import functools
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lm_human_preferences import __version__, storage
from lm_human_preferences.distributed import ranks
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_dir
from lm_human_preferences.utils import hyperparams, option_help, streams
from lm_human_preferences.utils.arguments import convert, did_you_mean, read_words
from lm_human_preferences.utils.combos import Trial
from lm_human_preferences.utils.hyperparams import group_class, members, option

if TYPE_CHECKING:
    from lm_human_preferences.hparams import train_policy, train_reward

Settings = TypeVar('Settings', bound=hyperparams.HParams)

HELP = ['-h', '--help']
HELP_ALL = '--help-all'
_UNBROKEN = '\xa0'  # a space at which click does not break lines
LONGEST_NAME = 255
ENDED_BY_SIGNAL = {
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
}  # statuses


class Program(click.Group):
    """A group of commands in which a mistake of the user is one line and status 2."""

    def __init__(self, **attrs: Any) -> None:
        version = click.Option(
            ['--version'],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help='Show the versions of this program, of Python and of PyTorch, and exit.',
        )
        super().__init__(params=[version], **attrs)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> None:
        """Run the command that `args`, by default those of this process, begin with; errors end the
        process."""
        args = list(sys.argv[1:] if args is None else args)
        streams.make_safe()
        ranks.speak_only_if_first()
        try:
            super().main(
                args or ['--help'],
                **extra,
                standalone_mode=False,
                help_option_names=HELP,
                token_normalize_func=lambda word: word.replace('-', '_'),
            )
        except (UserError, click.ClickException) as e:
            message = e.format_message() if isinstance(e, click.ClickException) else str(e)
            if isinstance(
                e, (click.NoSuchCommand, click.NoSuchOption)
            ):  # utils/arguments.py finds later ones
                message += f' The command comes first: {", ".join(self.commands)}'
            note(f'error: {" ".join(message.splitlines())}')
            sys.exit(2)
        except click.Abort:
            sys.exit(130)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command that was given."""
        with streams.closed_pipe_is_quiet():
            return super().invoke(ctx)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib import metadata  # slow, and of no use to a training

    try:
        torch = f'PyTorch {metadata.version("torch")}'  # without importing it, which takes seconds
    except metadata.PackageNotFoundError:
        torch = 'PyTorch is not installed'
    python = '.'.join(map(str, sys.version_info[:3]))
    click.echo(f'lm-human-preferences {__version__} (Python {python}, {torch})')
    ctx.exit()


class Command(click.Command):
    """A command whose options are dataclass fields; `callback(settings, *arguments)` gets the
    values that were given.

    arguments: click's, all of them required. positionals: names of options that may follow them by
    position. example: a command line, for the help page and for the error of a missing argument.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., object],
        fields: option_help.Fields,
        arguments: Sequence[click.Argument] = (),
        positionals: Sequence[str] = (),
        *,
        example: str = '',
        **attrs: Any,
    ) -> None:
        self.fields, self.positionals, self.example = fields, positionals, example
        self.arguments = {argument.name: argument.human_readable_name for argument in arguments}
        options = [_click_option(key, field) for key, field in fields.items()]
        if any(key.startswith(f'{option_help.NEW_REWARD_MODEL}.') for key in fields):
            options.append(
                click.Option(
                    [HELP_ALL],
                    is_flag=True,
                    expose_value=False,
                    help=f'Also show the options --{option_help.NEW_REWARD_MODEL}.NAME and exit.',
                )
            )
        super().__init__(name, callback=callback, params=[*arguments, *options], **attrs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave to click what it does well: help, and completions for the shell."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if {*HELP, HELP_ALL} & set(args):
            ctx.meta[HELP_ALL] = HELP_ALL in args
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.params = read_words(
            args, self.fields, self.arguments, self.positionals, example=self.example
        )
        return []

    def invoke(self, ctx: click.Context) -> object:
        """Convert the values that were given, and call the command's function."""
        given = {key: ctx.params[key] for key in self.fields if key in ctx.params}
        settings = {key: convert(key, self.fields[key], text) for key, text in given.items()}
        for key, value in settings.items():
            if given[key] == 'True' and type(value) in (int, float):
                note(f'note: --{key} without a value means 1')
        assert self.callback is not None
        return self.callback(settings, *(ctx.params[key] for key in self.arguments))

    def get_help(self, ctx: click.Context) -> str:
        """The help page; a default is on one line with what it is the default of."""
        return super().get_help(ctx).replace(_UNBROKEN, ' ')

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and the example."""
        super().format_help_text(ctx, formatter)
        if self.example:
            with formatter.section('Example'):
                formatter.write(f'{"":{formatter.current_indent}}{self.example}\n')

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections. One line stands for those of a new reward model, unless
        all are asked for."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx))
        }
        for heading, fields in option_help.sections(self.fields).items():
            if heading == option_help.FOLDED and not ctx.meta.get(HELP_ALL):
                rows = [
                    (
                        f'--{option_help.NEW_REWARD_MODEL}.NAME',
                        (
                            f'{HELP_ALL} shows these {len(fields)} options, which are those of'
                            ' train_reward. The seed is one of them: --run.seed does not set it,'
                            f' --{option_help.NEW_REWARD_MODEL}.run.seed does'
                        ),
                    )
                ]
            else:
                rows = [records.pop(_identifier(key)) for key in fields]
            with formatter.section(heading):
                formatter.write_dl(rows)
        others = [
            record for name, record in records.items() if name not in map(_identifier, self.fields)
        ]
        with formatter.section('Help'):
            formatter.write_dl(others)


def _identifier(key: str) -> str:
    """The name of an option among click's parameters, which is an identifier of Python."""
    return key.replace('.', '__')


def _click_option(key: str, field: dataclasses.Field) -> click.Option:
    words, default = option_help.choices(field), option_help.default_text(field)
    remark = '[required]' if default is None else f'[default:{_UNBROKEN}{default}]'
    return click.Option(
        [f'--{key}', _identifier(key)],
        metavar=option_help.value_text(field),
        help=f'{field.metadata["help"]}  {remark}',
        shell_complete=lambda ctx, param, incomplete: [
            word for word in words if word.startswith(incomplete)
        ],
    )


def note(message: str) -> None:
    """A line to the user that is no part of the output."""
    click.echo(message, err=True)


def validated(hparams: Settings) -> Settings:
    """`hparams`, checked; what its class finds wrong is a UserError."""
    try:
        hparams.validate()
    except (AssertionError, TypeError, ValueError) as e:
        raise UserError(str(e)) from e
    return hparams


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


def run(job: str, arguments: dict[str, Any], mpi: int | None) -> None:
    """Call `job`, 'module:function', with keyword `arguments`, in `mpi` ranks (None: as many as
    there are GPUs)."""
    if 'VISIBLE_DEVICES' in os.environ:  # what the original read instead
        os.environ.setdefault('CUDA_VISIBLE_DEVICES', os.environ['VISIBLE_DEVICES'])
    size = _size(mpi)
    hparams: Any = arguments.get('hparams')

    def show_resume_hint() -> None:
        if hasattr(hparams, 'writes'):
            note(run_dir.resume_hint(hparams))

    try:
        if ranks.launched_size() > 1:
            ranks.run(job, arguments, at_interrupt=show_resume_hint)
        elif size > 1:
            if hasattr(hparams, 'check_ranks'):
                hparams.check_ranks(size)
            ranks.launch(job, arguments, size)
        else:
            ranks.function(job)(**arguments)
    except KeyboardInterrupt:
        show_resume_hint()
        raise
    except SystemExit as e:
        if e.code in ENDED_BY_SIGNAL and hasattr(hparams, 'writes'):
            run_dir.release(hparams.run.directory)
            show_resume_hint()
        raise


def _size(mpi: int | None) -> int:
    """How many ranks a job has: those that a launcher has started, else `mpi`, else one for each
    GPU."""
    launched = ranks.launched_size()
    if launched > 1 and mpi not in (None, launched):
        raise UserError(
            f'--mpi {mpi}, but {launched} ranks were started by mpiexec or srun: leave --mpi out'
        )
    return launched if launched > 1 else mpi or max(1, _visible_gpus())


def _visible_gpus() -> int:
    import torch  # takes seconds: only a job that starts pays for it

    return torch.cuda.device_count()


def job_command(
    name: str,
    job: str,
    hparam_class: type[hyperparams.HParams] = hyperparams.HParams,
    arguments: Sequence[str] = (),
    **attrs: Any,
) -> Command:
    """The command `name ARGUMENT ... [--option value ...]`, which runs `job` with all of them as
    keyword arguments.

    In one rank, unless it has the options of RankHParams.
    """

    def start(settings: dict[str, Any], *values: str) -> None:
        hparams = hparam_class()
        override(hparams, settings)
        nested = validated(hparams).to_nested_dict()
        mpi, _ = nested.pop('mpi', 1), nested.pop('mode', None)
        run(job, {**dict(zip(arguments, values)), **nested}, mpi)

    return Command(
        name,
        start,
        hyperparams.fields(hparam_class),
        [click.Argument([key]) for key in arguments],
        **attrs,
    )


def experiment_command(
    name: str,
    job: str,
    hparam_class: 'type[train_policy.HParams] | type[train_reward.HParams]',
    experiments: Mapping[str, Sequence[Trial]],
    *,
    help: str,
    example: str = '',
    complete: Callable[[dict[str, Any], Any, str], dict[str, Any]] = lambda settings, *_: settings,
) -> Command:
    """The command `name EXPERIMENT NAME [--option value ...]`, which runs `job` with an
    experiment's hyperparameters.

    experiments: name -> trials (see combos). complete(settings, hparams, experiment) returns the
    user's settings and what follows from them, given the experiment's hyperparameters.
    """
    launch_class = dataclasses.make_dataclass(
        'LaunchHParams',
        bases=(RankHParams,),
        fields=[
            (
                'dry_run',
                bool,
                option(False, 'print the resolved hyperparameters and start nothing'),
            ),
            (
                'save_dir',
                str | None,
                option(f'/tmp/save/{name}', 'the run is kept here, in NAME; None: it is not'),
            ),
            (
                'overwrite',
                bool,
                option(False, 'delete what a run of this NAME has left, and start anew'),
            ),
        ],
    )
    launch_fields = hyperparams.fields(launch_class)

    def launch_experiment(settings: dict[str, Any], exp: str, trial_name: str) -> None:
        """Resolve all trials of an experiment before the first of them starts."""
        if exp not in experiments:
            raise UserError(
                f'no experiment {exp!r} for {name}: choose from {", ".join(experiments)}'
                + did_you_mean(exp, experiments)
            )
        _check_name(trial_name)
        launch = validated(
            launch_class(**{key: settings.pop(key) for key in launch_fields if key in settings})
        )
        jobs = []
        for trial in experiments[exp]:
            binds, descriptor = read_trial(trial)
            hparams = hparam_class()
            hparams.override_from_dict(binds)
            explicitly_set = complete(settings, hparams, exp)
            override(hparams, explicitly_set)
            job_name = f'{trial_name}/{descriptor}'.rstrip('/')
            if launch.save_dir:
                hparams.run.save_dir = storage.join(launch.save_dir, job_name)
            jobs.append((job_name, binds, validated(hparams), explicitly_set))
        if launch.save_dir and 'run.save_dir' in settings:
            note(
                'note: --run.save_dir has no effect: the run is kept in --save_dir joined with NAME'
            )
        if launch.dry_run:
            for job_name, binds, hparams, _ in jobs:
                click.echo(f'{job_name}: {binds}')
                hyperparams.dump(hparams)
                _dry_run(hparams, launch)
            return
        for _, _, hparams, explicitly_set in jobs:
            run_dir.prepare_run_dir(
                hparams, overwrite=launch.overwrite, explicitly_set=explicitly_set
            )
        for *_, hparams, _ in jobs:
            before = run_dir.ranks_of(hparams.run.directory) if hparams.run.resume else None
            run(job, {'hparams': hparams}, launch.mpi or before)

    arguments = [
        click.Argument(
            ['exp'],
            metavar='EXPERIMENT',
            shell_complete=lambda ctx, param, incomplete: [
                exp for exp in experiments if exp.startswith(incomplete)
            ],
        ),
        click.Argument(['name']),
    ]
    return Command(
        name,
        launch_experiment,
        {**launch_fields, **settable(hparam_class)},
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


def _dry_run(
    hparams: 'train_policy.HParams | train_reward.HParams',
    launch: Any,
) -> None:
    """Check all that can be checked without work, and say what would start."""
    from lm_human_preferences.commands.dry_run import dry_run  # loads torch

    for line in dry_run(hparams, _size(launch.mpi), launch.overwrite):
        note(line)


def settable(hparam_class: type[hyperparams.HParams]) -> option_help.Fields:
    """The fields that are options on the command line: values, and groups that may be off."""
    return {
        key: field
        for key, field in hyperparams.fields(hparam_class).items()
        if not group_class(field.type) or types.NoneType in members(field.type)
    }


def _check_name(name: str) -> None:
    if (
        not name.strip('/')
        or name.startswith('/')
        or '..' in name.split('/')
        or not name.isprintable()
        or len(name) > LONGEST_NAME
    ):
        raise UserError(
            f'NAME {name!r:.80} must be a relative path without .., of at most {LONGEST_NAME}'
            ' characters: it is joined to --save_dir'
        )


def read_trial(trial: Trial) -> tuple[dict[str, Any], str]:
    """What a trial binds, in its order, and the descriptors of its entries joined by dashes."""
    binds: dict[str, Any] = {}
    for var, value, _ in trial:
        if var in binds:
            note(f'WARNING: overriding key {var} from {binds[var]} to {value}')
        if var is not None:
            binds[var] = value
    return binds, '-'.join(
        str(extra['descriptor']) for _, _, extra in trial if 'descriptor' in extra
    )


def override(hparams: hyperparams.HParams, settings: Mapping[str, Any]) -> None:
    """Lay the user's settings over `hparams`. A leaf switches its group on; `on` leaves a group
    that is on as it is."""
    settings = dict(settings)
    for group in [key for key, field in settable(type(hparams)).items() if group_class(field.type)]:
        leaf = next((key for key in settings if key.startswith(f'{group}.')), None)
        if leaf and settings.get(group) == 'off':
            raise UserError(f'--{leaf} has no meaning with --{group} off: drop one of them')
        if leaf or settings.get(group) == 'on':
            settings[group] = 'on'
            if (
                functools.reduce(
                    lambda hp, part: getattr(hp, part, None), group.split('.'), hparams
                )
                is not None
            ):
                del settings[group]
    hparams.override_from_dict(settings)
