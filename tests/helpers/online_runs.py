"""Small runs that collect labels while they train, and what is left of them."""

import contextlib
import io
import json
import threading
from pathlib import Path

from experiments import resolved
from interrupted import result_of

from lm_human_preferences import train_policy
from lm_human_preferences.distributed.comm import Comm

# Ten steps; the reward model is trained before the first and before those of RETRAINED.
SETTINGS = {
    'ppo.total_episodes': 640,
    'run.save_interval': 2,
    'rewards.train_new_model.batch_size': 8,
    'rewards.train_new_model.normalize_samples': 64,
    'rewards.online': 'on',
    'rewards.online.labels': 93,
    'rewards.online.initial': 24,
    'rewards.online.retrainings': 4,
    'rewards.online.source': 'test',
    'rewards.online.error': 0.2,
}
RETRAINED = [2, 3, 4, 6]  # 10 (1 - sqrt(1 - k/5)), rounded up
WORDS = [
    f'--{name}={value}' for name, value in SETTINGS.items() if name != 'rewards.online'
]  # the same as options


def online_hparams(directory, **settings):
    """The experiment `test` with SETTINGS, kept in `directory`; settings: with __ for dots."""
    hparams = resolved('train_policy', 'test')
    given = {name.replace('__', '.'): value for name, value in settings.items()}
    hparams.override_from_dict({**SETTINGS, **given})
    hparams.run.save_dir = None if directory is None else str(directory)
    hparams.validate()
    return hparams


def train(directory, comm=None, **settings):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        train_policy.train(online_hparams(directory, **settings), comm or Comm())
    return out.getvalue()


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def models_of(directory):
    return [line for line in lines_of(directory / 'labels/used.jsonl') if 'digest' in line]


def online_result(directory):
    """Return the result of a finished run, but for when people answered and how it began."""
    directory = Path(directory)
    found = {
        key: value
        for key, value in result_of(directory).items()
        if not str(key).endswith(('_hparams.json', 'run.json'))
        and not str(key).startswith('labels/answers/')
    }
    answers = {}
    for path in directory.glob('labels/answers/*.jsonl'):
        answers[path.stem] = sorted((line['question'], line['best']) for line in lines_of(path))
    return {**found, 'answers': answers}


@contextlib.contextmanager
def meanwhile(work, directory):
    """Within the block, work(directory, done) goes on in a thread, until the event `done`."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(directory, done))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def alike(directory):
    result = online_result(directory)
    (result['answers'],) = result['answers'].values()
    used = models_of(directory)
    result['labels/used.jsonl'] = [(line['step'], line['labels']) for line in used]
    return result
