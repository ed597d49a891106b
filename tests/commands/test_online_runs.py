"""Trainings that collect labels: questions asked, reward model trained, exactly repeated."""

import contextlib
import http.client
import json
import shutil
import time
import types
from random import Random

import numpy as np
import pytest
from command_line import caught_jobs, error_of, invoke, succeed, told
from events import events_of
from interrupted import assert_same
from launched import Launch, eventually, needs_mpi
from online_runs import (
    RETRAINED,
    WORDS,
    alike,
    lines_of,
    meanwhile,
    models_of,
    online_hparams,
    online_result,
    train,
)
from page_client import Client

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.online_options import OnlineHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.simulated import simulate, simulated_answer
from lm_human_preferences.labels.training_data import score_small_tokens
from lm_human_preferences.online import collection

PEOPLE = {
    'rewards__online__source': 'people',
    'rewards__online__error': 0.0,
    'rewards__online__patience': 0.02,
}


@pytest.fixture(scope='module')
def live(tmp_path_factory):
    directory = tmp_path_factory.mktemp('online') / 'live'
    (directory.parent / 'said').write_text(train(directory))
    return directory


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(collection, 'POLL_SECONDS', 0.01)


def test_reward_models_are_trained_at_the_computed_steps(live):
    models, events = models_of(live), events_of(live / 'tb/ppo')
    schedule = online_hparams(live).rewards.online.schedule(10)
    assert [line['step'] for line in models] == [0, *RETRAINED] == schedule.training_steps()
    assert [line['model'] for line in models] == [1, 2, 3, 4, 5]
    for line in models:
        # l(n) = 24 + 69 (1 - (1 - n)^2); with what was asked ahead
        assert line['wanted'] == 24 + np.ceil(69 * (1 - (1 - line['step'] / 10) ** 2) - 1e-9)
        assert line['labels'] >= min(line['wanted'] + 2, 93)
    for name in ('wanted', 'labels', 'model'):
        assert events[f'online/{name}'] == [(line['step'], line[name]) for line in models]
    assert [step for step, _ in events['online/loss']] == [0, *RETRAINED]
    assert 'reward model 2 of 5, before step 3: ' in (live.parent / 'said').read_text()
    questions = lines_of(live / 'labels/questions.jsonl')
    assert len({question['id'] for question in questions}) == len(questions) == 93
    assert all(question['policies'] == ['policy'] * 4 for question in questions)
    episodes = [question['episode'] for question in questions]
    assert episodes == sorted(episodes)


# Five steps; the reward model is trained before the first, the second and the fourth.
ALIKE = {
    'rewards__online__labels': 48,
    'rewards__online__retrainings': 2,
    'ppo__total_episodes': 320,
}


@contextlib.contextmanager
def asking_one_by_one():
    """Every question is answered before the next step, however many there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineHParams, 'asked_at_once', 1)
        patch.setattr(OnlineHParams, 'ahead', 0)
        yield


@pytest.fixture(scope='module')
def simulated(tmp_path_factory):
    directory = tmp_path_factory.mktemp('simulated') / 'run'
    with asking_one_by_one():
        train(directory, **ALIKE, rewards__online__error=0.0)
    return directory


def folder_when_asked(directory):
    eventually((directory / 'labels/task.json').exists, 60)
    folder = LabelFolder(str(directory / 'labels'))
    eventually(lambda: (folder.refresh(), len(folder.questions) >= 24)[1], 60)
    time.sleep(0.5)
    return folder


def answer_in_terminal(directory, done):
    with Labeller(folder_when_asked(directory), 'test') as labeller:
        while not done.is_set():
            simulate(labeller, score_small_tokens)
            time.sleep(0.01)


def same_texts(folder, shown):
    """Return the id of the question that a page shows, and its samples in the folder's order."""
    encoder = folder.encoding().get_encoder()
    for id, question in folder.questions.items():
        query, *samples = map(encoder.decode, question.tokens().values())
        if query == shown['query'] and sorted(samples) == sorted(shown['samples']):
            return id, samples
    raise AssertionError(shown)


def test_a_page_that_is_served_with_the_training(tmp_path, simulated, quick, monkeypatch):
    said = []
    monkeypatch.setattr(collection, 'announce', lambda *lines: said.extend(lines))

    def answer_on_page(directory, done):
        folder = folder_when_asked(directory)
        client = Client(said[0].partition(': ')[2])
        with contextlib.suppress(OSError, http.client.HTTPException):  # when the run ends
            while not done.is_set():
                if question := client.question():
                    folder.refresh()
                    id, texts = same_texts(folder, question)
                    _, *samples = folder.questions[id].tokens().values()
                    rewards = [-float(sum(tokens)) for tokens in samples]
                    best = simulated_answer(folder.label_type, rewards, Random(f'0/test/{id}'))
                    client.answer(question['id'], question['samples'].index(texts[best]) + 1)
                time.sleep(0.01)
        client.close()

    serve = {'run__serve': 'on', 'run__serve__labellers': 'test', 'run__serve__port': 0}
    with asking_one_by_one(), meanwhile(answer_on_page, tmp_path / 'run'):
        train(tmp_path / 'run', **{**ALIKE, **PEOPLE, **serve})
    assert said[0].startswith('answer as test: http://127.0.0.1:')
    waiting = [line for line in said if line.startswith('waiting for 24 of 24 labels; to answer: ')]
    assert waiting and './launch.py label' in waiting[0]
    assert_same(alike(tmp_path / 'run'), alike(simulated))


@needs_mpi
@pytest.mark.slow
def test_two_ranks_wait_and_learn_what_one_does(tmp_path):
    """Before the first step: later the policy's own samples are those of more random streams."""
    settings = {
        'ppo.total_episodes': 128,
        'rewards.online.labels': 32,
        'rewards.online.initial': 32,
        'rewards.online.retrainings': 0,
        'rewards.online.error': 0.0,
        'rewards.train_new_model.normalize_samples': 0,
    }
    train(tmp_path / 'one', **{name.replace('.', '__'): value for name, value in settings.items()})
    settings |= {'rewards.online.source': 'people', 'rewards.online.patience': 0.02}
    launch = Launch(tmp_path, '--mpi=2', *WORDS, *(f'--{k}={v}' for k, v in settings.items()))
    with meanwhile(answer_in_terminal, launch.run):
        assert launch.wait() == 0, launch.errors()
    assert models_of(tmp_path / 'one') == models_of(launch.run)
    one, two = (
        Bundle(checkpoints.latest(str(directory / 'policy/checkpoints')))
        for directory in (tmp_path / 'one', launch.run)
    )
    names = [name for name in one if name.startswith('reward_model/')]
    assert len(names) > 20
    for name in names:
        np.testing.assert_allclose(np.array(two[name]), np.array(one[name]), rtol=0, atol=5e-6)


def test_a_run_saves_and_ends_when_patience_runs_out(live, tmp_path, monkeypatch):
    directory = tmp_path / 'run'
    shutil.copytree(live / 'labels', directory / 'labels')
    # As far as the first reward model; what was asked stays, but nobody has answered the rest.
    used = (directory / 'labels/used.jsonl').read_text().splitlines(keepends=True)
    (directory / 'labels/used.jsonl').write_text(''.join(used[:2]))
    counts = models_of(directory)[0]['answers']
    for name, count in counts.items():
        path = directory / f'labels/answers/{name}.jsonl'
        path.write_text(''.join(path.read_text().splitlines(keepends=True)[:count]))
    now = [0.0]

    def sleep(seconds):
        assert seconds == 1  # ranks meet that often, as others wait for no longer than some seconds
        now[0] += 100 * seconds

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(collection, 'time', clock)
    with pytest.raises(UserError) as caught:
        train(directory, **{**PEOPLE, 'rewards__online__patience': 0.5}, run__resume=True)
    assert 1800 <= now[0] <= 1900  # half an hour
    message = str(caught.value)
    assert message.startswith('--rewards.online.patience 0.5: ')
    step = int(message.partition('step ')[2].partition(' ')[0])
    _, state = checkpoints.latest_resumable(str(directory / 'policy/checkpoints'))
    assert state['trainer']['step'] == step
    assert message.endswith(f'then continue with `./launch.py resume {directory}`')
    for path in (live / 'labels/answers').iterdir():  # people come back
        shutil.copy(path, directory / 'labels/answers')
    (directory / 'labels/used.jsonl').write_text(''.join(used))
    train(directory, **PEOPLE, run__resume=True)
    result = online_result(directory)
    listed = result.pop('policy/checkpoints/checkpoint')
    assert f'"model.ckpt-{step}"'.encode() in listed
    kept = {key: value for key, value in result.items() if f'model.ckpt-{step}.' not in str(key)}
    expected = online_result(live)
    del expected['policy/checkpoints/checkpoint']
    assert_same(kept, expected)


def test_skipped_questions_are_asked_anew_as_others(tmp_path, quick):
    directory = tmp_path / 'run'

    def roughly(queries, responses):
        return (score_small_tokens(queries, responses) / 4).round()

    def skip_some(directory, done):
        folder = folder_when_asked(directory)
        with Labeller(folder, 'anna') as anna, Labeller(folder, 'ben') as ben:
            for question in list(folder.questions.values())[:5]:
                for labeller in (anna, ben):
                    labeller.answer(question, None, 1.0, reason='other')
            while not done.is_set():
                simulate(anna, roughly)
                time.sleep(0.01)

    settings = {'rewards__online__retrainings': 0, 'ppo__total_episodes': 64}
    settings['rewards__online__ties'] = True
    with asking_one_by_one(), meanwhile(skip_some, directory):
        train(directory, **{**ALIKE, **PEOPLE, **settings})
    asked = [line['episode'] for line in lines_of(directory / 'labels/questions.jsonl')]
    assert asked == [0] * 29
    assert models_of(directory)[0]['wanted'] == 24
    given = [line.get('best') for line in lines_of(directory / 'labels/answers/anna.jsonl')]
    assert 2 < given.count('tie') < 22  # which the reward model has learned from


def test_a_run_that_is_longer_now_asks_for_no_more_labels(live, tmp_path):
    directory = shutil.copytree(live, tmp_path / 'run')
    train(directory, run__resume=True, ppo__total_episodes=1280)
    assert len(lines_of(directory / 'labels/questions.jsonl')) == 93


def test_changed_answers_are_noticed(live, tmp_path):
    directory = tmp_path / 'run'
    shutil.copytree(live / 'labels', directory / 'labels')
    path = directory / 'labels/answers/test.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    chosen = json.loads(lines[0])['best']
    other = lines[0].replace(f'"best": {chosen}', f'"best": {(chosen + 1) % 4}')
    path.write_text(''.join([other, *lines[1:]]))
    with pytest.raises(UserError, match='answers from which a reward model has learned were chang'):
        train(directory, **PEOPLE, run__resume=True)


MISTAKES = """
--rewards.online.labels=9 --rewards.online.initial=10
    --rewards.online.initial 10 is more than --rewards.online.labels 9
--rewards.online.labels=960 --rewards.online.retrainings=99
    --rewards.online.retrainings 99: two of them would be at one of the 100 steps
--rewards.online.labels=960 --rewards.train_new_model=off
    --rewards.online needs --rewards.train_new_model on
--rewards.online.labels=960 --rewards.online.error=0.1
    --rewards.online.error 0.1 is for another --rewards.online.source than people
--run.serve=on
    --run.serve needs --rewards.online with the source people
--rewards.online.labels=960 --save_dir=None
    --rewards.online.source people needs a folder, so not --save_dir None
"""


@pytest.mark.parametrize('words, fact', told(MISTAKES))
def test_mistakes_are_told_before_anything_starts(tmp_path, words, fact):
    command = f'train_policy test run --save_dir={tmp_path} --dry_run {words}'
    assert fact in error_of(invoke(command))


def test_what_people_have_answered_is_not_overwritten(live, tmp_path, monkeypatch):
    directory = tmp_path / 'run'
    shutil.copytree(live, directory)
    with Labeller(LabelFolder(str(directory / 'labels')), 'anna'):
        pass  # has looked, and answered nothing
    words = ['train_policy', 'test', 'run', f'--save_dir={tmp_path}', '--mpi=1', '--overwrite']
    words += WORDS
    succeed([*words, '--dry_run'])
    path = directory / 'labels/answers/anna.jsonl'
    others = (live / 'labels/answers/test.jsonl').read_text()
    path.write_text(others.splitlines(keepends=True)[0].replace(', "simulated": true', ''))
    before = online_result(directory)
    told = error_of(invoke(words))
    assert told.startswith(f'--overwrite would delete the answers of people in {path}: ')
    offline = [word for word in words if not word.startswith('--rewards.online')]
    assert error_of(invoke(offline)) == told
    assert invoke([*words, '--dry_run']).stderr == f'error: {told}\n'
    assert_same(online_result(directory), before)
    path.unlink()
    started = caught_jobs(monkeypatch)
    assert invoke(words).exit_code == 0 and started
    assert not (directory / 'labels/questions.jsonl').exists()
