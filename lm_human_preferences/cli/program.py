"""Click commands: options made from dataclass fields, help pages, errors in one line."""

import contextlib
import dataclasses
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import click

from lm_human_preferences import __version__, errors
from lm_human_preferences.cli.arguments import convert, expanded, read_words
from lm_human_preferences.distributed import launch_methods, worker
from lm_human_preferences.errors import UserError, disk_errors_reported
from lm_human_preferences.hparams.policy_options import NEW_MODEL
from lm_human_preferences.utils import streams
from lm_human_preferences.utils.hyperparams import group_class, members
from lm_human_preferences.utils.streams import error_line, note

Fields = dict[str, dataclasses.Field]

LAUNCHING = ('mpi', 'dry_run', 'save_dir', 'overwrite')
HEADINGS = {  # {group of options: its heading on help pages}; '' is for options outside groups
    'run': 'Run',
    'task': 'Task',
    'task.policy': 'Policy',
    'task.policy.lora': 'Adapters',
    'labels': 'Labels',
    '': 'Reward training',
    'lora': 'Adapters of a reward model',
    'rewards': 'Rewards',
    'rewards.adaptive_kl': 'Adaptive KL',
    'rewards.online': 'Online labels',
    'run.serve': 'Page for labellers',
    'ppo': 'PPO',
}
_TYPES = {int: 'INT', float: 'FLOAT', str: 'TEXT', tuple[str, ...]: 'TEXT', types.NoneType: 'None'}
HELP = ['-h', '--help']
FAILED = 2  # exit status after a user's mistake
INTERRUPTED = 130


class Program(click.Group):
    """Group of commands that reports a mistake of the user in one line, with status 2."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        message = 'lm-human-preferences %(version)s'
        click.version_option(__version__, message=message)(self)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> None:
        """Run the command that `args`, or sys.argv, begin with; end the process on an error."""
        args = list(sys.argv[1:] if args is None else args)
        streams.make_safe()
        try:
            with disk_errors_reported():
                if launch_methods.current().decides_size:
                    worker.become_rank()
                super().main(
                    args or ['--help'],
                    **extra,
                    standalone_mode=False,
                    help_option_names=HELP,
                    token_normalize_func=lambda word: word.replace('-', '_'),
                )
        except UserError as e:
            _fail(str(e))
        except click.ClickException as e:
            message = e.format_message()
            if isinstance(e, click.UsageError) and e.ctx is not None:  # an error that click found
                message += f' The command comes first: {", ".join(self.commands)}'
            _fail(message)
        except ModuleNotFoundError as e:
            if e.name is None or e.name.startswith('lm_human_preferences'):
                raise
            _fail(errors.missing(e.name))
        except click.Abort:
            sys.exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        with streams.closed_pipe_is_quiet():
            return super().invoke(ctx)


def _fail(message: str) -> None:
    streams.mute_notes(False)
    note(error_line(message))
    with contextlib.suppress(UserError):  # the launcher's environment variables may be invalid
        if launch_methods.current().rank:
            time.sleep(worker.REPORT_SECONDS)  # rank 0 reports the error and ends before this rank
    sys.exit(FAILED)


class Command(click.Command):
    """Command with options from dataclass fields; `callback(settings, *arguments)` runs it."""

    def __init__(
        self,
        name: str,
        callback: Callable[..., object],
        fields: Fields,
        arguments: Sequence[str | click.Argument] = (),
        positionals: Sequence[str] = (),
        *,
        example: str = '',
        **attrs: Any,
    ) -> None:
        self.fields = fields
        self.positionals = positionals
        self.example = example
        params: list[click.Parameter] = []
        self.arguments: dict[str, str] = {}
        self.rest = None
        for argument in arguments:
            if isinstance(argument, click.Argument):
                param = argument
            else:
                param = click.Argument([argument], type=click.Path())
            params.append(param)
            self.arguments[param.name] = param.human_readable_name
            if param.nargs < 0:
                self.rest = param.name
        params += [_click_option(key, field) for key, field in fields.items()]
        epilog = f'\b\nExample:\n  {example}' if example else None
        super().__init__(name, callback=callback, params=params, epilog=epilog, **attrs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line as python-fire did; leave help and shell completion to click."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if set(HELP) & set(args):
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.params = read_words(args, self.fields, self.arguments, self.positionals, rest=self.rest)
        return []

    def invoke(self, ctx: click.Context) -> object:
        """Convert the given texts to values and call the command's function with them."""
        given = {key: text for key, text in ctx.params.items() if key in self.fields}
        settings = {key: convert(key, self.fields[key], text) for key, text in given.items()}
        for key, value in settings.items():
            if given[key] == 'True' and type(value) in (int, float):
                note(f'note: --{key} without a value means 1')
        assert self.callback is not None
        arguments = []
        for param in self.params[: len(self.arguments)]:
            word = ctx.params[param.name]
            arguments.append(expanded(word) if isinstance(param.type, click.Path) else word)
        return self.callback(settings, *arguments)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options to the help page, in sections."""
        records = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                records[param.name] = record
        for heading, fields in sections(self.fields).items():
            with formatter.section(heading):
                formatter.write_dl([records[_identifier(key)] for key in fields])
        with formatter.section('Help'):
            own = {_identifier(key) for key in self.fields}
            formatter.write_dl([records[name] for name in records if name not in own])


def _click_option(key: str, field: dataclasses.Field) -> click.Option:
    default = default_text(field)
    remark = '[required]' if default is None else f'[default: {default}]'
    return click.Option(
        [f'--{key}', _identifier(key)],
        metavar=value_text(field),
        help=f'{field.metadata.get("help") or ""}  {remark}',
        hidden=field.metadata.get('help', '') is None,  # shells do not complete hidden options
    )


def _identifier(key: str) -> str:
    """Return the name of the option's click parameter, which must be a Python identifier."""
    return key.replace('.', '__')


def shown(fields: Fields) -> Fields:
    """Return the `fields` {name: field} that help pages show."""
    return {name: field for name, field in fields.items() if not _is_hidden(name, field)}


def _is_hidden(name: str, field: dataclasses.Field) -> bool:
    """Return whether help pages omit the option `name`, such as --rewards.train_new_model.lr."""
    return name.startswith(f'{NEW_MODEL}.') or field.metadata.get('help', '') is None


def sections(fields: Fields) -> dict[str, Fields]:
    """Return {heading: fields to show}; commands that do not train have one heading, 'Options'."""
    fields = shown(fields)
    if not any(name.startswith('run.') for name in fields):
        return {'Options': fields} if fields else {}
    by_heading: dict[str, Fields] = {}
    for heading in ('Launching', *HEADINGS.values()):
        by_heading[heading] = {}
    for name, field in fields.items():
        heading = 'Launching' if name in LAUNCHING else HEADINGS[name.rpartition('.')[0]]
        by_heading[heading][name] = field
    return {heading: inside for heading, inside in by_heading.items() if inside}


def value_text(field: dataclasses.Field) -> str:
    """Return an option's values as help pages show them, such as 'INT|None' or 'true|false'."""
    if group_class(field.type):
        return 'on|off'
    if bool in members(field.type):
        return 'true|false'
    return '|'.join(_TYPES[ty] for ty in members(field.type))


def default_text(field: dataclasses.Field) -> str | None:
    """Return an option's default as text; None for a required option."""
    if field.default is None and types.NoneType not in members(field.type):
        return None
    if group_class(field.type):
        return 'off'
    if field.default == ():
        return 'none'
    return repr(field.default)
