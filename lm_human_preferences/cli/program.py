"""The click layer of the commands: options made from dataclass fields, help pages, user errors."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from lm_human_preferences import __version__, shell
from lm_human_preferences.cli import option_help
from lm_human_preferences.cli.arguments import convert, read_words
from lm_human_preferences.distributed import worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import streams
from lm_human_preferences.utils.streams import note
from lm_human_preferences.utils.terminal import printable

HELP = ['-h', '--help']
HELP_ALL = '--help-all'
FAILED = 2  # exit status after a mistake of the user
INTERRUPTED = 130
_UNBROKEN = '\xa0'  # a space at which click does not break lines


class Program(click.Group):
    """A group of commands that reports a mistake of the user in one line, with status 2."""

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
        """Run the command that `args` begin with (by default those of this process).

        A mistake of the user and Ctrl-C end the process.
        """
        args = list(sys.argv[1:] if args is None else args)
        streams.make_safe()
        worker.mute_unless_rank_0()
        try:
            super().main(
                args or ['--help'],
                **extra,
                standalone_mode=False,
                help_option_names=HELP,
                token_normalize_func=lambda word: word.replace('-', '_'),
            )
        except UserError as e:
            _fail(str(e))
        except (click.NoSuchCommand, click.NoSuchOption) as e:
            # An unknown option after the command is reported by utils/arguments.py.
            _fail(f'{e.format_message()} The command comes first: {", ".join(self.commands)}')
        except click.ClickException as e:
            _fail(e.format_message())
        except ModuleNotFoundError as e:
            if e.name is None or e.name.startswith('lm_human_preferences'):
                raise
            _fail(shell.missing(e.name))
        except click.Abort:
            sys.exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command that was given."""
        with streams.closed_pipe_is_quiet():
            return super().invoke(ctx)


def _fail(message: str) -> None:
    line = printable(' '.join(message.splitlines()))
    note(f'error: {line}')
    worker.settle_user_error(line)
    sys.exit(FAILED)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib import metadata  # slow to import, and no training needs it

    try:
        # Importing torch would take seconds.
        torch = f'PyTorch {metadata.version("torch")}'
    except metadata.PackageNotFoundError:
        torch = 'PyTorch is not installed'
    python = '.'.join(map(str, sys.version_info[:3]))
    click.echo(f'lm-human-preferences {__version__} (Python {python}, {torch})')
    ctx.exit()


class Command(click.Command):
    """A command whose options are dataclass fields.

    `callback(settings, *arguments)` gets the values that were given on the command line. arguments:
    click's, all of them required; one may take several values. positionals: names of options that
    may follow them by position. example: a command line, for the help page and for the error about
    a missing argument.
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
        self.fields = fields
        self.positionals = positionals
        self.example = example
        self.arguments = {argument.name: argument.human_readable_name for argument in arguments}
        self.rest = next((argument.name for argument in arguments if argument.nargs < 0), None)
        options = [_click_option(key, field) for key, field in fields.items()]
        if any(key.startswith(f'{option_help.NEW_REWARD_MODEL}.') for key in fields):
            options.append(_help_all_option())
        super().__init__(name, callback=callback, params=[*arguments, *options], **attrs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what click would reject; leave help and shell completion to click."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if {*HELP, HELP_ALL} & set(args):
            ctx.meta[HELP_ALL] = HELP_ALL in args
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.params = read_words(
            args,
            self.fields,
            self.arguments,
            self.positionals,
            rest=self.rest,
            example=self.example,
            elsewhere=_options_of_all(ctx),
        )
        return []

    def invoke(self, ctx: click.Context) -> object:
        """Convert the values that were given, and call the command's function."""
        given = {key: text for key, text in ctx.params.items() if key in self.fields}
        settings = {key: convert(key, self.fields[key], text) for key, text in given.items()}
        for key, value in settings.items():
            if given[key] == 'True' and type(value) in (int, float):
                note(f'note: --{key} without a value means 1')
        assert self.callback is not None
        arguments = [ctx.params[key] for key in self.arguments]
        return self.callback(settings, *arguments)

    def get_help(self, ctx: click.Context) -> str:
        """The help page. '[default: X]' is never broken over two lines."""
        return super().get_help(ctx).replace(_UNBROKEN, ' ')

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and the example."""
        super().format_help_text(ctx, formatter)
        if self.example:
            with formatter.section('Example'):
                formatter.write(f'{"":{formatter.current_indent}}{self.example}\n')

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections.

        The options of a new reward model are summed up in one line, unless --help-all is given.
        """
        records = self._help_records(ctx)
        for heading, fields in option_help.sections(self.fields).items():
            rows = [records.pop(_identifier(key)) for key in fields]
            if heading == option_help.FOLDED and not ctx.meta.get(HELP_ALL):
                rows = [_folded_record(len(fields))]
            with formatter.section(heading):
                formatter.write_dl(rows)
        with formatter.section('Help'):
            formatter.write_dl(list(records.values()))

    def _help_records(self, ctx: click.Context) -> dict[str, tuple[str, str]]:
        """{name of an option among click's parameters: (its name and type, its help)}."""
        records = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                record = param.get_help_record(ctx)
                if record:
                    records[param.name] = record
        return records


def _options_of_all(ctx: click.Context) -> dict[str, list[str]]:
    """{option: the commands that have it}, of the program that the command belongs to."""
    program = ctx.parent.command if ctx.parent is not None else None
    found: dict[str, list[str]] = {}
    for name, command in program.commands.items() if isinstance(program, Program) else ():
        for key in command.fields if isinstance(command, Command) else ():
            found.setdefault(key, []).append(name)
    return found


def _folded_record(count: int) -> tuple[str, str]:
    """The line that stands for the `count` options of a new reward model."""
    prefix = f'--{option_help.NEW_REWARD_MODEL}'
    return (
        f'{prefix}.NAME',
        f'{HELP_ALL} shows these {count} options, which train_reward has, too. The seed is one'
        f' of them: --run.seed does not set it, {prefix}.run.seed does',
    )


def _help_all_option() -> click.Option:
    return click.Option(
        [HELP_ALL],
        is_flag=True,
        expose_value=False,
        help=f'Also show the options --{option_help.NEW_REWARD_MODEL}.NAME and exit.',
    )


def _click_option(key: str, field: dataclasses.Field) -> click.Option:
    default = option_help.default_text(field)
    remark = '[required]' if default is None else f'[default:{_UNBROKEN}{default}]'
    return click.Option(
        [f'--{key}', _identifier(key)],
        metavar=option_help.value_text(field),
        help=f'{option_help.help_text(field)}  {remark}',
        shell_complete=completion(option_help.choices(field)),
        hidden=not option_help.is_shown(field),
    )


def _identifier(key: str) -> str:
    """The name of an option among click's parameters, which must be a Python identifier."""
    return key.replace('.', '__')


def completion(words: Sequence[str]) -> Callable[..., list[str]]:
    """What click calls to complete a value in the shell: it offers those of `words` that fit."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete
