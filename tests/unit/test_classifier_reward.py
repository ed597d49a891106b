"""A reward that a sequence classifier of transformers gives."""

import json

import pytest
import torch
from command_line import error_of, invoke, last_error_of, succeed
from safetensors.torch import load_file, save_file
from tiny_classifiers import OF_FAMILY, change_config, change_json, write_classifier

import sample
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.datasets.reviews import WORDS
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import evaluate
from lm_human_preferences.language import encodings
from lm_human_preferences.lm_tasks import TaskHParams
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.classifier import Classifier
from lm_human_preferences.reward_sources.texts import Texts, joined

TEXTS = [
    joined(' '.join(WORDS[:start]), ' '.join(WORDS[start : start + count]))
    for start, count in ((3, 2), (0, 1), (9, 4), (2, 3), (5, 0), (1, 12))
]


@pytest.fixture(scope='module')
def classes(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp('classes'), names=('bad', 'good'))


def logits_of(directory, texts=TEXTS):
    """By transformers itself, one text at a time, without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokeniser = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        rows = [model(torch.tensor([tokeniser(each.whole).input_ids])).logits for each in texts]
    return torch.cat(rows)


@pytest.mark.parametrize('family', OF_FAMILY)
def test_scores_are_those_of_transformers(tmp_path, family):
    directory = write_classifier(tmp_path, family)
    expected = logits_of(directory)[:, 0]
    assert expected.std() > 0.05
    torch.testing.assert_close(Classifier(directory).score(TEXTS), expected)


@pytest.mark.parametrize(
    'family, padding',
    [('llama', None), ('llama', 4), ('llama', len(WORDS)), ('gpt2', 4)],
)
def test_the_token_that_is_read_is_that_of_transformers(tmp_path, family, padding):
    """The padding token may begin a text, end it, be in its middle, be all of it, or nowhere."""
    directory = write_classifier(tmp_path, family, pad_token_id=padding)
    expected = logits_of(directory)[:, 0]
    torch.testing.assert_close(Classifier(directory).score(TEXTS), expected)


@pytest.mark.parametrize('family', ['bert', 'llama'])
def test_types_of_tokens_are_those_of_the_tokeniser(tmp_path, family):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    directory = write_classifier(tmp_path, family)
    pieces = {
        'single': [{'Sequence': {'id': 'A', 'type_id': 1}}],
        'pair': [{'Sequence': {'id': 'A', 'type_id': 1}}, {'Sequence': {'id': 'B', 'type_id': 1}}],
    }
    template = {'type': 'TemplateProcessing', **pieces, 'special_tokens': {}}
    change_json(tmp_path / 'tokenizer.json', post_processor=template)
    names = ['input_ids', 'token_type_ids', 'attention_mask']
    change_json(tmp_path / 'tokenizer_config.json', model_input_names=names)
    inputs = AutoTokenizer.from_pretrained(directory)(TEXTS[0].whole, return_tensors='pt')
    assert inputs['token_type_ids'].all()
    if family == 'llama':
        del inputs['token_type_ids']
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = model(**inputs).logits[:, 0]
    torch.testing.assert_close(Classifier(directory).score(TEXTS[:1]), expected)


def test_a_class_gives_its_log_odds(tmp_path):
    directory = write_classifier(tmp_path, 'bert', names=('bad', 'so so', 'good'))
    shares = logits_of(directory).double().softmax(1)[:, 1]
    found = Classifier(directory, 'so so').score(TEXTS)
    torch.testing.assert_close(found, (shares / (1 - shares)).log().float())
    change_config(directory, problem_type='multi_label_classification')
    shares = logits_of(directory).double().sigmoid()[:, 1]
    found = Classifier(directory, 'so so').score(TEXTS)
    torch.testing.assert_close(found, (shares / (1 - shares)).log().float())
    change_config(directory, problem_type='regression')
    with pytest.raises(UserError, match='predicts 3 numbers, none of which can be chosen'):
        Classifier(directory, 'so so')


@pytest.mark.parametrize('name', [None, 'fine'])
def test_classes_that_are_not_there(classes, name):
    with pytest.raises(UserError, match='has the outputs bad, good: to choose the class whose log'):
        Classifier(classes, name)


def test_scores_whose_square_is_not_finite_are_refused(tmp_path):
    directory = write_classifier(tmp_path)
    tensors = load_file(tmp_path / 'model.safetensors')
    tensors['score.weight'] *= 1e37
    save_file(tensors, tmp_path / 'model.safetensors', {'format': 'pt'})
    with pytest.raises(UserError, match=r'gives the score \S+e\+3\d: a reward must be finite'):
        Classifier(directory).score(TEXTS)


@pytest.mark.parametrize('family', ['gpt2', 'roberta'])
def test_what_is_too_long_loses_its_beginning(tmp_path, family):
    directory = write_classifier(tmp_path, family)
    words = (list(WORDS) * 2)[:70]
    long, cut = joined(' '.join(words), WORDS[5]), joined(' '.join(words[-63:]), WORDS[5])
    found = Classifier(directory).score([long, cut])
    torch.testing.assert_close(found, logits_of(directory, [cut, cut])[:, 0])


def test_a_chat_is_read_in_the_own_template(tmp_path):
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    directory = write_classifier(tmp_path)
    change_json(tmp_path / 'tokenizer_config.json', chat_template=template)
    rules = json.loads((tmp_path / 'tokenizer.json').read_text())
    vocab = {**rules['model']['vocab'], 'user': 62, 'assistant': 63}
    change_json(tmp_path / 'tokenizer.json', model={**rules['model'], 'vocab': vocab})
    texts = [joined(WORDS[3], WORDS[7])]
    spelled = [joined('', f'user {WORDS[3]} assistant {WORDS[7]}')]
    plain = Classifier(directory)
    assert Classifier(directory, chat=True).score(texts) == plain.score(spelled)
    assert plain.score(texts) != plain.score(spelled)
    # A turn of the assistant that the query ends with goes on.
    query = f'user: {WORDS[3]}\n\nassistant: {WORDS[7]}'
    begun = [Texts(query, f' {WORDS[2]}', f'{query} {WORDS[2]}')]
    spelled = [joined('', f'user {WORDS[3]} assistant {WORDS[7]} {WORDS[2]}')]
    for texts in (begun, [joined(query, WORDS[2])]):
        assert Classifier(directory, chat=True).score(texts) == plain.score(spelled)
        judge = loading.load_judge(str(directory), encodings.Reviews, TaskHParams(chat=True))
        assert judge.scorer.score(texts) == plain.score(spelled)


def test_a_text_without_a_token_is_named(classes):
    texts = [joined(WORDS[0], WORDS[1]), joined('', '  ')]
    with pytest.raises(UserError, match="its tokeniser returns no tokens for '  '"):
        Classifier(classes, 'good').score(texts)


def test_a_policy_learns_from_a_class(tmp_path, classes, capsys):
    succeed(
        f'train_policy mock_sentiment run --mpi 1 --save_dir {tmp_path} --run.evaluate off'
        ' --ppo.batch_size 32 --ppo.total_episodes 32 --ppo.noptepochs 1'
        f' --rewards.train_new_model off --rewards.trained_model {classes}'
        ' --rewards.class_name good'
    )
    run = tmp_path / 'run'
    bundle = Bundle(checkpoints.latest(f'{run}/policy/checkpoints'))
    assert {name.partition('/')[0] for name in bundle} >= {'policy', 'ref_policy'}
    assert not any(name.startswith('reward_model/') for name in bundle)
    succeed(f'resume {run} --ppo.total_episodes 64')

    out = tmp_path / 'samples.jsonl'
    succeed(f'sample --save_dir {run} --nsamples 3 --mpi 1 --output {out}', sample.cli)
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [joined(each['query'], each['response']) for each in samples]
    expected = Classifier(classes, 'good').score(texts)
    torch.testing.assert_close(torch.tensor([each['score'] for each in samples]), expected)

    results = evaluate.evaluate(str(run), judge=f'{classes}#bad', queries=2, samples=64)
    told = capsys.readouterr().out
    assert '\nclassifier ' in told
    assert 'reward model' not in told.partition('estimated')[2]
    of_run, judged = (results['rewards'][name]['policy'] for name in ('classifier', 'judge'))
    assert of_run['reward'] == pytest.approx(-judged['reward'], abs=1e-4)  # the log odds of two


def test_texts_are_scored(tmp_path, classes):
    texts = tmp_path / 'texts.jsonl'
    record = {'query': WORDS[3], 'sample0': WORDS[4], 'sample1': ' '.join(WORDS[:30])}
    texts.write_text(json.dumps(record))
    result = succeed(f'score {classes}#good {texts}')
    pairs = [joined(WORDS[3], record[name]) for name in ('sample0', 'sample1')]
    expected = Classifier(classes, 'good').score(pairs)
    torch.testing.assert_close(torch.tensor(list(json.loads(result.stdout).values())), expected)
    told = error_of(invoke(f'score {tmp_path}#good {texts}'))
    fault = 'is not a classifier saved by transformers, and has no classes'
    assert told == f'RUN good: {tmp_path} {fault}'


def test_a_classifier_is_asked_once(tmp_path):
    classifier = write_classifier(tmp_path / 'classifier')
    words = 'train_policy mock_sentiment a --dry_run --save_dir None --rewards.train_new_model off'
    words += f' --rewards.trained_model {classifier} --task.query_dataset reviews'
    succeed(words)
    (tmp_path / 'classifier' / 'model.safetensors').unlink()
    assert 'classifier' in last_error_of(invoke(words))
