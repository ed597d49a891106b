"""Web server of the labelling page, which runs until Ctrl-C."""

import os
import signal

import click

from lm_human_preferences import shell
from lm_human_preferences.hparams.labelling_options import LabelHParams
from lm_human_preferences.labels.labeller import names_in
from lm_human_preferences.labels.page.server import LabelServer, missing_tls
from lm_human_preferences.utils import stop_signals
from lm_human_preferences.utils.streams import note


def serve(folder: str, options: LabelHParams) -> None:
    """Serve a folder's page to the labellers, and print a link for each of them."""
    assert options.web is not None
    names = names_in(options.labeller)
    server = LabelServer(folder, names, options.web, note=note)
    with stop_signals.handled(stop_signals.interrupt, signal.SIGTERM, signal.SIGHUP):
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
    report = shell.typed('./launch.py labels', os.path.abspath(folder))
    click.echo(f'{server.summary} The report: {report}')
