"""The commands of docs/models.md, with small numbers, and the film reviews with a Llama."""

import re
import runpy
import sys

import numpy as np
import pytest
from command_line import invoke
from console import printed
from documentation import page
from launched import REPOSITORY
from tiny_causal_lms import save, tiny
from tiny_tokenisers import write_byte_level

import sample

SMALL = (
    '--ppo.total_episodes 64 --rewards.train_new_model.labels.num_train 64'
    ' --rewards.train_new_model.normalize_samples 16 --mpi 1 --save_dir .'
)


def commands(section, path='docs/models.md'):
    (text,) = re.findall(rf'^## {section}\n(.*?)^## ', page(path), re.M | re.S)
    return re.findall(r'^    pipenv run (.*)$', text, re.MULTILINE)


def run(line):
    program, _, words = line.partition(' ')
    result = invoke(words, sample.cli) if 'sample' in program else invoke(words)
    assert result.exit_code == 0, (line, result.output, result.exception)
    return result


def test_how_a_model_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tiny('llama', vocab_size=448), tmp_path / 'my-model')
    write_byte_level(tmp_path / 'my-model')
    dry, train, sampled, export = commands('Use a model')
    for line in (dry, train):
        assert ' sentiment mine ' in line
        run(f'{line.replace(" sentiment ", " test ")} {SMALL}')
    for line in (sampled, export):
        run(line.replace('/tmp/save/train_policy/', ''))
    assert (tmp_path / 'my-policy/model.safetensors').exists()


@pytest.fixture(scope='module')
def reviews(tmp_path_factory):
    folder = tmp_path_factory.mktemp('reviews')
    make, train = commands('A Llama', 'benchmarks/quality.md')
    script, directory = make.removeprefix('python ').split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, 'argv', [script, directory, '--steps', '200'])
        runpy.run_path(str(REPOSITORY / script), run_name='__main__')
    return folder, train


def test_a_llama_learns_what_is_liked(reviews, monkeypatch):
    """Against the known reward, which knows the words of its tokeniser."""
    folder, train = reviews
    monkeypatch.chdir(folder)
    few = (
        '--save_dir . --ppo.total_episodes 2560 --rewards.train_new_model off'
        ' --rewards.trained_model mock --run.console original --run.log_interval 1'
    )
    scores = printed('objective/score', run(f'{train} {few} --run.evaluate false').stdout)
    assert len(scores) == 10 and np.mean(scores[-2:]) > scores[0] + 0.3


def test_simulated_people_know_the_reward_of_its_words(reviews, monkeypatch):
    folder, train = reviews
    monkeypatch.chdir(folder)
    model = train[train.index('--task.policy.initial_model') :]
    run(f'./launch.py ask mock_sentiment labels --count 40 {model}')
    run('./launch.py label labels --labeller anna --simulate on')
    assert '40 questions, 40 answered' in run('./launch.py labels labels').stdout
    more = '--labels.source labels --labels.num_train 32 --normalize_samples 32 --save_dir .'
    run(f'./launch.py train_reward mock_sentiment reward --mpi 1 {model} {more}')
    assert '40 labels' in run('./launch.py labels labels --reward reward').stdout
