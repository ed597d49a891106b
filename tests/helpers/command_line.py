"""Running the command line inside a test, without starting a job."""

import contextlib
import io

import pytest
from click.testing import CliRunner

import launch
from lm_human_preferences.cli import launch as jobs
from lm_human_preferences.utils import hyperparams

NEW = 'rewards.train_new_model'
PUBLISHED = 'az://openaipublic/lm-human-preferences/runs/{}/reward_model'


@pytest.fixture
def started(monkeypatch):
    return caught_jobs(monkeypatch)


def caught_jobs(monkeypatch):
    """A list that will hold (job, arguments, mpi) of every job that a command would start."""
    found = []

    def start_job(job, arguments, mpi, **settings):
        found.append((job, arguments, mpi))

    monkeypatch.setattr(jobs, 'start_job', start_job)
    return found


def invoke(argv, cli=launch.cli):
    return CliRunner().invoke(cli, argv.split() if isinstance(argv, str) else argv)


def succeed(argv, cli=launch.cli):
    result = invoke(argv, cli)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def error_of(result):
    assert (result.exit_code, result.stdout) == (2, ''), result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return last_error_of(result)


def last_error_of(result):
    """Return the mistake that ended a command, whatever it has printed before."""
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith('error: '), line
    return line.removeprefix('error: ')


def told(table):
    """Read a table of command lines, each followed by indented lines of what is said of it."""
    cases = []
    for line in table.strip().splitlines():
        if line.startswith(' '):
            cases[-1][1].append(line.strip())
        elif line:
            cases.append((line, []))
    return [pytest.param(words, ' '.join(lines), id=words) for words, lines in cases]


def hparams_of(started):
    ((_, job_arguments, _),) = started
    return job_arguments['hparams']


def dumped(hparams):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        hyperparams.dump(hparams)
        hyperparams.dump_additions(hparams)
    return out.getvalue()


def flat(nested, prefix=''):
    found = {}
    for key, value in nested.items():
        found |= (
            flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
        )
    return found
