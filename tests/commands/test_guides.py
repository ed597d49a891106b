"""The commands of docs/labelling.md, online.md, models.md and quality.md, with small numbers."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from command_line import caught_jobs, hparams_of, succeed
from documentation import page
from launched import REPOSITORY
from sample_files import write_lines
from tiny_causal_lms import save, tiny
from tiny_tokenisers import write_byte_level

import launch
import sample
from lm_human_preferences.labels.folder import LabelFolder

FEW_SAMPLES = '--rewards.train_new_model.normalize_samples 64'
FILES = {  # that commands of docs/labelling.md read
    'questions.jsonl': {'query': 'the film was', 'sample0': 'good', 'sample1': 'dull'},
    'gold.jsonl': {'query': 'the plot was', 'sample0': 'bad', 'sample1': 'great', 'best': 1},
    'texts.jsonl': {'query': 'the film was', 'response': 'very good'},
}
PAIRS = [
    {'prompt': f'the {what} was', 'chosen': f'{good} {when}', 'rejected': f'{bad} {when}'}
    for what in ('film', 'plot', 'story', 'cast', 'music', 'script')
    for good, bad in (('good', 'bad'), ('great', 'dull'), ('funny', 'silly'))
    for when in ('today', 'throughout', 'indeed')
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def commands(path, section=''):
    """Return the commands of a page, or of one of its sections."""
    text = page(path)
    if section:
        text = text.partition(f'\n## {section}\n')[2].partition('\n## ')[0]
    return re.findall(r'^    pipenv run (.*)$', text, re.MULTILINE)


def run(line, more=''):
    program, *words = shlex.split(f'{line} {more}')
    return succeed(words, sample.cli if program == './sample.py' else launch.cli).stdout


@pytest.mark.slow
def test_labelling(tmp_path):
    for name, record in FILES.items():
        write_lines(Path(name), [record])
    write_lines(Path('pairs.jsonl'), PAIRS)
    printed = {}
    for line in commands('docs/labelling.md'):
        line, command = line.replace('/tmp/save', f'{tmp_path}/save'), line.split()[1]
        if '--web' in line:  # test_label_page.py serves these
            continue
        more = ''
        if command == 'label' and '--simulate.error' not in line:
            more = '--simulate on'
        if command == 'train_reward':
            more = f'--save_dir {tmp_path}/save/train_reward --normalize_samples 64'
        if command == 'train_policy':
            assert '--rewards.train_new_model.epochs 16' in line
            more = f'--save_dir {tmp_path}/save/train_policy {FEW_SAMPLES} --run.evaluate false'
            more += ' --ppo.total_episodes 128 --rewards.train_new_model.epochs 1'
        printed.setdefault(command, []).append(run(line, more))
    assert printed['label'][0] == 'anna (simulated) has given 200 answers\n'
    questions = list(LabelFolder('my-labels').questions.values())
    assert len(questions) == 200 + 100 + 50
    first, second = (f'{tmp_path}/save/train_policy/{name}-taste' for name in ('first', 'second'))
    assert [question.policies for question in questions[200:]] == [
        *[[first] * 4] * 100,
        *[[first, first, second, second]] * 50,
    ]
    assert len(json.loads(Path('my-labels.json').read_text())) > 200
    assert json.loads(Path('report.json').read_text())['reward']
    assert len(LabelFolder('my-pairs').questions) == 2 + len(PAIRS)
    assert list(json.loads(printed['score'][0])) == ['score']


@pytest.mark.slow
def test_online(tmp_path, monkeypatch):
    people, label, simulated = commands('docs/online.md')
    few = '--save_dir . --ppo.total_episodes 128 --run.evaluate=false --rewards.online.labels 64'
    printed = run(simulated, f'{few} --rewards.online.retrainings 0 {FEW_SAMPLES}')
    assert 'reward model 1 of 1, before step 1: 32 labels' in printed
    label = label.replace('/tmp/save/train_policy/mine', 'online')
    assert 'anna (simulated) has given 0 answers' in run(label, '--simulate on')
    started = caught_jobs(monkeypatch)
    run(people, '--save_dir .')
    hparams = hparams_of(started)
    assert (hparams.rewards.online.labels, hparams.run.serve.labellers) == (5000, 'me')


def test_how_a_model_is_used(tmp_path):
    save(tiny('llama', vocab_size=448), tmp_path / 'my-model')
    write_byte_level(tmp_path / 'my-model')
    dry, train, sampled, export = commands('docs/models.md', 'Use a model')
    few = f'--mpi 1 --save_dir . --ppo.total_episodes 64 {FEW_SAMPLES}'
    for line in (dry, train):
        assert ' sentiment mine ' in line
        line = line.replace(' sentiment ', ' test ')
        run(line, f'{few} --rewards.train_new_model.labels.num_train 64')
    for line in (sampled, export):
        run(line.replace('/tmp/save/train_policy/', ''))
    assert Path('my-policy/model.safetensors').exists()


def test_a_llama_is_made_and_trained(tmp_path, monkeypatch):
    make, train = commands('benchmarks/quality.md', 'A Llama')
    script, directory = make.removeprefix('python ').split()
    monkeypatch.setattr(sys, 'argv', [script, directory, '--steps', '2'])
    runpy.run_path(str(REPOSITORY / script), run_name='__main__')
    few = '--save_dir . --ppo.total_episodes 256 --rewards.train_new_model off'
    run(train, f'{few} --rewards.trained_model mock --run.evaluate false')
    assert list(tmp_path.rglob('model.ckpt-1.index'))
