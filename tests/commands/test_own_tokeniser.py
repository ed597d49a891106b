"""Commands with a model that has a tokeniser of its own."""

import json
import shutil

import pytest
from command_line import error_of, invoke
from tiny_tokenisers import write_byte_level, write_words

from lm_human_preferences.labels.folder import LabelFolder

PAIRS = [
    {'prompt': 'It was late.', 'chosen': ' The fox jumps.', 'rejected': ' She said so twice.'},
    {'prompt': '東京', 'chosen': ' the lazy dog', 'rejected': ' Nobody answered.'},
]


def write_model(directory, write=write_byte_level, **settings):
    """The directory of a model, without its weights."""
    write(directory, **settings)
    (directory / 'config.json').write_text('{"model_type": "llama"}')
    return directory


def run(line):
    result = invoke(line)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / 'pairs.jsonl'
    path.write_text(''.join(f'{json.dumps(pair)}\n' for pair in PAIRS))
    return path


def import_line(model, pairs, output):
    return (
        f'import_labels sentiment {pairs} {output} --labels.type best_of_2'
        f' --task.policy.initial_model {model}'
    )


def test_files_of_token_ids_say_which_tokeniser_they_are_of(tmp_path, pairs):
    """Whether they are imported or exported; those of the original's encodings are as before."""
    model, folder = write_model(tmp_path / 'model'), tmp_path / 'labels'
    run(import_line(model, pairs, folder))
    run(f'labels {folder} --export {tmp_path}/exported.json')
    run(import_line(model, pairs, tmp_path / 'imported.json'))
    name = LabelFolder(str(folder)).task['encoding']
    for file in ('exported.json', 'imported.json'):
        labels = json.loads((tmp_path / file).read_text())
        assert [label['encoding'] for label in labels] == [name] * len(PAIRS)
    pairs.write_text('{"prompt": "ab", "chosen": "c", "rejected": "d"}\n')
    options = '--labels.type best_of_2 --task.truncate_token None'
    run(f'import_labels test {pairs} {tmp_path}/test.json {options}')
    assert json.loads((tmp_path / 'test.json').read_text())[0].keys() == {
        'query',
        'sample0',
        'sample1',
        'best',
    }


def test_a_folder_of_labels_has_the_tokeniser_with_it(tmp_path, pairs):
    """It can be read where the model is not, and takes no tokens of another encoding."""
    model, folder = write_model(tmp_path / 'model'), tmp_path / 'labels'
    run(import_line(model, pairs, folder))
    assert LabelFolder(str(folder)).task['encoding'].startswith('tokenizer-')
    shutil.rmtree(model)
    run(f'labels {folder} --export {tmp_path}/out.jsonl --export_as preferences')
    lines = (tmp_path / 'out.jsonl').read_text().splitlines()
    assert [json.loads(line) for line in lines] == PAIRS
    words = ' '.join(value for pair in PAIRS for value in pair.values()).split()
    other = write_model(tmp_path / 'other', lambda path: write_words(path, words))
    told = error_of(invoke(import_line(other, pairs, folder)))
    assert 'is a folder of another task: its encoding is ' in told and told.count('tokenizer-') == 2
