"""Serving the page for labellers until Ctrl-C."""

from __future__ import annotations

import signal
from typing import Any, NoReturn

import click

from lm_human_preferences import shell
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.labelling_options import LabelHParams
from lm_human_preferences.labels.page.server import LabelServer, missing_tls
from lm_human_preferences.utils.streams import note


def serve(folder: str, options: LabelHParams) -> None:
    """Serve a folder's page to the labellers, and print a link for each of them."""
    assert options.web is not None
    names = _names(options.labeller)
    server = LabelServer(folder, names, options.web, note=note)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if warning := missing_tls(options.web):
            note(warning)
        width = max(map(len, names))
        for name, link in server.links.items():
            click.echo(f'{name:{width}}  {link}')
        click.echo('Each link is for one labeller. Ctrl-C ends the page; the links stay valid.')
        server.wait()
    except KeyboardInterrupt:
        click.echo()
    finally:
        server.close()
        signal.signal(signal.SIGTERM, before)
    click.echo(_ending(folder, server.service.summary()))


def _names(labellers: str) -> list[str]:
    """The names in a list; UserError for one that comes twice."""
    names = [name.strip() for name in labellers.split(',')]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f'--labeller {labellers:.80} names {min(twice)} twice')
    return names


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _ending(folder: str, summary: dict[str, Any]) -> str:
    """The line that says what there is, and what comes next."""
    done = ', '.join(f'{name} {count}' for name, count in summary['done'].items())
    return (
        f'Saved: {done}. {summary["open"]} questions are open. The report:'
        f' {shell.typed("./launch.py labels", folder)}'
    )
