"""Pages for labellers that tests serve, with texts of their own."""

import contextlib
from pathlib import Path
from unittest import mock

from click.testing import CliRunner
from label_folders import make_folder
from page_client import Client

import launch
from lm_human_preferences.hparams.command_options import LabelHParams, WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.page.server import LabelServer
from lm_human_preferences.language.encodings import Encoder, Encoding


class ByteEncoder(Encoder):
    """An encoding in which any text can be shown: a token is a byte of UTF-8."""

    padding_token = 256
    eot_token = None

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode()


class ByteEncoding(Encoding):
    def get_encoder(self):
        return ByteEncoder()


def write_texts(path, texts, label_type='best_of_4', **header):
    """Write a folder of (query, sample, ...) in ByteEncoder."""
    samples = len(texts[0]) - 1
    names = ['sample'] if samples == 1 else [f'sample{i}' for i in range(samples)]
    new = [
        dict(zip(['query', *names], map(ByteEncoder().encode, row), strict=True)) for row in texts
    ]
    task = {'label_type': label_type}
    make_folder(path, len(new), task=task, samples=samples, new=new, **header)


def web_options(**options):
    return LabelHParams(web=WebHParams(**{'port': 0, **options})).web


@contextlib.contextmanager
def served(path, *names, notes=None, **options):
    """Yield the server of a page, and a client for each labeller; `notes` gets its notes."""
    note = (lambda line: None) if notes is None else notes.append
    encoding = ByteEncoding('bytes', 256, None)
    with (
        mock.patch.object(LabelFolder, 'encoding', lambda folder: encoding),
        LabelServer(str(path), names, web_options(**options), note=note) as server,
    ):
        clients = [Client(link) for link in server.links.values()]
        try:
            yield server, *clients
        finally:
            for client in clients:
                client.close()


def written(path):
    files = sorted(Path(path, 'answers').glob('*.jsonl'))
    return [line for file in files for line in file.read_text().splitlines()]


def answers_of(path, name='anna'):
    return list(LabelFolder(str(path)).logs[name].kept.values())


def places(path, name='anna'):
    """Return where each chosen sample stood on the screen."""
    return [answer.order.index(answer.value) for answer in answers_of(path, name)]


def press(path, keys, *options, name='anna'):
    argv = ['label', str(path), '--labeller', name, *options]
    result = CliRunner().invoke(launch.cli, argv, input=keys)
    assert result.exit_code == 0, result.output
    return result.stdout
