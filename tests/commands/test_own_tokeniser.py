"""Commands with a model that has a tokeniser of its own."""

import json
import shutil

import pytest
from command_line import error_of, invoke, succeed
from tiny_causal_lms import write_chat_model
from tiny_tokenisers import END, write_byte_level, write_words

import sample
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.language.texts import chat

PAIRS = [
    {'prompt': 'It was late.', 'chosen': ' The fox jumps.', 'rejected': ' She said so twice.'},
    {'prompt': '東京', 'chosen': ' the lazy dog', 'rejected': ' Nobody answered.'},
]


def write_model(directory, write=write_byte_level):
    write(directory)
    (directory / 'config.json').write_text('{"model_type": "llama"}')
    return directory


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
    model, folder = write_model(tmp_path / 'model'), tmp_path / 'labels'
    succeed(import_line(model, pairs, folder))
    succeed(f'labels {folder} --export {tmp_path}/exported.json')
    name = LabelFolder(str(folder)).task['encoding']
    labels = json.loads((tmp_path / 'exported.json').read_text())
    assert [label['encoding'] for label in labels] == [name] * len(PAIRS)
    pairs.write_text('{"prompt": "ab", "chosen": "c", "rejected": "d"}\n')
    options = '--labels.type best_of_2 --task.truncate_token None'
    succeed(f'import_labels test {pairs} {tmp_path}/test {options}')
    succeed(f'labels {tmp_path}/test --export {tmp_path}/test.json')
    label = json.loads((tmp_path / 'test.json').read_text())[0]
    assert label.keys() == {'query', 'sample0', 'sample1', 'best'}


def test_a_folder_of_labels_has_the_tokeniser_with_it(tmp_path, pairs):
    model, folder = write_model(tmp_path / 'model'), tmp_path / 'labels'
    succeed(import_line(model, pairs, folder))
    assert LabelFolder(str(folder)).task['encoding'].startswith('tokenizer-')
    shutil.rmtree(model)
    succeed(f'labels {folder} --export {tmp_path}/out.jsonl --export_as preferences')
    lines = (tmp_path / 'out.jsonl').read_text().splitlines()
    assert [json.loads(line) for line in lines] == PAIRS
    words = ' '.join(value for pair in PAIRS for value in pair.values()).split()
    other = write_model(tmp_path / 'other', lambda path: write_words(path, words))
    told = error_of(invoke(import_line(other, pairs, folder)))
    assert 'is a folder of another task: its encoding is ' in told and told.count('tokenizer-') == 2


DIALOGUE = [
    {'role': 'user', 'content': 'Who is lazy?'},
    {'role': 'assistant', 'content': 'The dog.'},
    {'role': 'user', 'content': 'Which?'},
]


@pytest.fixture
def queries(tmp_path):
    path = tmp_path / 'queries.jsonl'
    path.write_text(f'{json.dumps(DIALOGUE)}\n')
    path.with_suffix('.test.jsonl').write_text('"It was late. Why?"\n"Who is lazy?"\n')
    return path


@pytest.fixture
def chat_model(tmp_path):
    return write_chat_model(tmp_path / 'model')


@pytest.fixture
def contexts(monkeypatch):
    found, own = [], chat.ChatTemplate.contexts

    def seen(self, rows):
        rows = own(self, rows)
        found.extend(self.encoder.decode(row) for row in rows)
        return rows

    monkeypatch.setattr(chat.ChatTemplate, 'contexts', seen)
    return found


RENDERED = f'[user] Who is lazy?{END}[assistant] The dog.{END}[user] Which?{END}[assistant]'
RENDERED_TEST = {f'[user] {text}{END}[assistant]' for text in ('It was late. Why?', 'Who is lazy?')}


def test_a_policy_learns_to_chat(tmp_path, queries, chat_model, contexts):
    from transformers import AutoModelForCausalLM

    of_base = {'repetition_penalty': 1.1, 'top_p': 0.8, 'min_p': 0.1, 'temperature': 0.6}
    (chat_model / 'generation_config.json').write_text(json.dumps(of_base))
    reward = tmp_path / 'reward.py'
    reward.write_text('def score(queries, texts):\n    return [len(each) for each in texts]')
    function = f'--rewards.function {reward}:score'
    started = succeed(
        f'train_policy chat run --mpi 1 --save_dir {tmp_path} --task.policy.initial_model'
        f' {chat_model} --task.query_dataset {queries} --task.query_length 40'
        f' --task.policy.temperature 0.7 --task.response_length 20 --ppo.total_episodes 64'
        f' {function}'
    )
    assert f'A response ends with {END!r} (0), or after 20 tokens' in started.stdout
    assert set(contexts) == {RENDERED}
    contexts.clear()
    sampled = succeed(
        f'sample --save_dir {tmp_path}/run --nsamples 128 --batch_size 128 --seed 1 --mpi 1'
        f' --output {tmp_path}/samples.jsonl',
        sample.cli,
    )
    printed = sampled.stdout
    assert f'{queries.stem}.test.jsonl, the test split: 2 of 2 texts are used' in sampled.stderr
    assert 'It was late. Why?' in printed and END not in printed and '[user]' not in printed
    saved = [json.loads(line) for line in (tmp_path / 'samples.jsonl').read_text().splitlines()]
    assert any(0 in line['response_tokens'] for line in saved)
    assert all(END not in line['response'] for line in saved)
    assert set(contexts) == RENDERED_TEST
    succeed(f'export {tmp_path}/run {tmp_path}/exported')
    # `generate` of transformers: at the training's temperature, with nothing of the base's.
    config = AutoModelForCausalLM.from_pretrained(tmp_path / 'exported').generation_config
    assert config.eos_token_id == [0]
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.7, 0, 1)
    assert (config.repetition_penalty, config.min_p) == (1.0, None)
