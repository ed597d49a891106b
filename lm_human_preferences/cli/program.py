"""Click commands: options made from dataclass fields, help pages, errors in one line."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from lm_human_preferences import __version__, shell
from lm_human_preferences.cli import option_help
from lm_human_preferences.cli.arguments import convert, expanded, read_words
from lm_human_preferences.distributed import launch_methods, worker
from lm_human_preferences.errors import UserError, disk_errors_reported
from lm_human_preferences.utils import streams
from lm_human_preferences.utils.streams import note
from lm_human_preferences.utils.terminal import error_line

HELP = ['-h', '--help']
FAILED = 2  # exit status after a user's mistake
INTERRUPTED = 130


class Program(click.Group):
    """Group of commands that reports a mistake of the user in one line, with status 2."""

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
        """Run the command that `args`, or sys.argv, begin with; end the process on an error."""
        args = list(sys.argv[1:] if args is None else args)
        streams.make_safe()
        try:
            with disk_errors_reported():
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
            told = e.format_message()
            if isinstance(e, click.UsageError) and e.ctx is not None:  # click's own error
                told += f' The command comes first: {", ".join(self.commands)}'
            _fail(told)
        except ModuleNotFoundError as e:
            if e.name is None or e.name.startswith('lm_human_preferences'):
                raise
            _fail(shell.missing(e.name))
        except click.Abort:
            sys.exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        with streams.closed_pipe_is_quiet():
            return super().invoke(ctx)


def _fail(message: str) -> None:
    streams.mute_notes(False)
    note(error_line(message))
    with contextlib.suppress(UserError):  # about the variables that should tell the rank
        if launch_methods.current().rank:
            time.sleep(worker.REPORT_SECONDS)  # rank 0 reports for all, and ends first
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
    """Command with options from dataclass fields; `callback(settings, *arguments)` runs it."""

    def __init__(
        self,
        name: str,
        callback: Callable[..., object],
        fields: option_help.Fields,
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
        super().__init__(name, callback=callback, params=params, **attrs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as python-fire did; leave help and shell completion to click."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if set(HELP) & set(args):
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.params = read_words(
            args,
            self.fields,
            self.arguments,
            self.positionals,
            rest=self.rest,
            example=self.example,
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
        arguments = []
        for param in self.params[: len(self.arguments)]:
            word = ctx.params[param.name]
            arguments.append(expanded(word) if isinstance(param.type, click.Path) else word)
        return self.callback(settings, *arguments)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description and the example."""
        super().format_help_text(ctx, formatter)
        if self.example:
            with formatter.section('Example'):
                formatter.write(f'{"":{formatter.current_indent}}{self.example}\n')

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections, those of a new reward model as one line."""
        records = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                records[param.name] = record
        for heading, fields in option_help.sections(self.fields).items():
            rows = [records.pop(_identifier(key)) for key in fields]
            if heading == option_help.FOLDED:
                prefix = f'--{option_help.NEW_MODEL}'
                text = (
                    f'{len(fields)} options, which `train_reward --help` shows. The seed is one of'
                    f' them: --run.seed does not set it, {prefix}.run.seed does'
                )
                rows = [(f'{prefix}.NAME', text)]
            with formatter.section(heading):
                formatter.write_dl(rows)
        with formatter.section('Help'):
            formatter.write_dl(list(records.values()))


def _click_option(key: str, field: dataclasses.Field) -> click.Option:
    default = option_help.default_text(field)
    remark = '[required]' if default is None else f'[default: {default}]'
    return click.Option(
        [f'--{key}', _identifier(key)],
        metavar=option_help.value_text(field),
        help=f'{field.metadata.get("help") or ""}  {remark}',
        shell_complete=completion(option_help.choices(field)),
        hidden=not option_help.is_shown(field),
    )


def _identifier(key: str) -> str:
    """Return the name of the option's click parameter, which must be a Python identifier."""
    return key.replace('.', '__')


def completion(words: Sequence[str]) -> Callable[..., list[str]]:
    """Return a callback with which click completes a value in the shell to one of `words`."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete
