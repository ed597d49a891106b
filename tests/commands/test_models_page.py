"""The commands of docs/models.md and of the Llama in benchmarks/quality.md, with small numbers."""

import re
import runpy
import sys

from command_line import invoke
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


def test_a_llama_is_made_and_trained(tmp_path, monkeypatch):
    """Against the known reward, which knows the words of its tokeniser."""
    make, train = commands('A Llama', 'benchmarks/quality.md')
    script, directory = make.removeprefix('python ').split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', [script, directory, '--steps', '2'])
    runpy.run_path(str(REPOSITORY / script), run_name='__main__')
    few = '--save_dir . --ppo.total_episodes 256 --rewards.train_new_model off'
    run(f'{train} {few} --rewards.trained_model mock --run.evaluate false')
    assert list(tmp_path.rglob('model.ckpt-1.index'))
