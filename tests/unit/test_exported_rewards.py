"""language/exported and `export` of reward models: transformers gives the same scores."""

import json

import pytest
import torch
from command_line import error_of, invoke, succeed
from documentation import fenced
from golden_data import require_bpe
from reward_models import save_reward_model
from run_folders import write_settings
from tiny_causal_lms import save, tiny
from tiny_tokenisers import END, SENTENCES, write_byte_level, write_sentencepiece, write_words

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.exported import checks, classifier, tokeniser
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.reward_sources import loading

TEXTS = [*SENTENCES, ' he said', "'s", '\n\n', f'a{END}b', '<s>the', f'it was {tokeniser.PADDING}']
N_VOCAB = 448  # rows of the embedding, more than the tokeniser has tokens


def exported(run, out):
    succeed(f'export {run} {out}')
    return out


def classifier_in(directory):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(directory)


def own_reward(saved):
    model = loading.load_saved(saved)

    def reward(tokens):
        return model.score(torch.tensor([tokens]), torch.tensor([[model.padding_token]])).item()

    return reward


@pytest.fixture
def families(tmp_path):
    def make(family, **settings):
        if family == 'test':
            return 'test'
        save(tiny(family, **{'vocab_size': N_VOCAB, **settings}), tmp_path / 'initial')
        write_byte_level(tmp_path / 'initial')
        return tmp_path / 'initial'

    return make


@pytest.mark.parametrize('family', ['test', 'llama', 'opt'])
def test_a_batch_of_token_ids_scores_the_same(tmp_path, families, family):
    """Of any lengths, padded on the right, also behind a projection, as of OPT-350m."""
    settings = {'word_embed_proj_dim': 16} if family == 'opt' else {}
    saved = save_reward_model(tmp_path / 'reward_model', families(family, **settings))
    model = classifier_in(exported(saved.savedir, tmp_path / 'out'))
    n_vocab = saved.encoding.n_vocab
    generator, longest = torch.Generator().manual_seed(1), min(20, saved.sizes().n_ctx - 1)
    tokens = torch.randint(n_vocab, (100, longest), generator=generator)
    lengths = torch.randint(1, longest + 1, (100, 1), generator=generator)
    reward = own_reward(saved)
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    expected = torch.tensor([reward(row) for row in rows])
    mask = torch.arange(longest) < lengths
    with torch.no_grad():
        padded = tokens.masked_fill(~mask, n_vocab)
        found = model(input_ids=padded, attention_mask=mask.long()).logits[:, 0]
    constant = model.config.reward_constant
    assert constant != 0
    assert model.config.num_labels == 1 and model.config.problem_type == 'regression'
    assert model.config.pad_token_id == n_vocab
    difference = (found + constant - expected).abs().max()
    assert difference <= 2e-6 * expected.abs().max()
    assert expected.std() > 0.1


def test_a_card_has_lines_that_choose_the_best_of_16(tmp_path, families, capsys):
    initial = families('gpt2', n_positions=128)
    saved = save_reward_model(tmp_path / 'reward_model', initial)
    exported(saved.savedir, tmp_path / 'out')
    code = fenced(tmp_path / 'out/README.md', 'python').replace('ORG/NAME', f'{tmp_path}/out')
    found = {}
    capsys.readouterr()
    exec(code.replace('ORG/POLICY', str(initial)), found)
    encoder, reward = saved.encoding.get_encoder(), own_reward(saved)
    constant = storage.read_json(f'{tmp_path}/out/config.json')['reward_constant']
    rewards = [reward(encoder.encode(text)) - constant for text in found['texts']]
    assert len(rewards) == 16 and found['scores'] == pytest.approx(rewards, abs=1e-4)
    assert capsys.readouterr().out == f'{found["texts"][rewards.index(max(rewards))]}\n'


@pytest.mark.parametrize('write', [write_byte_level, write_sentencepiece])
def test_texts_have_the_same_tokens(tmp_path, write):
    from transformers import AutoTokenizer

    encoding = tokenisers.read(write(tmp_path / 'theirs'))
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/config.json').write_text('{"model_type": "llama"}')
    tokeniser.write_tokeniser(encoding, 20, str(tmp_path / 'out'))
    found = AutoTokenizer.from_pretrained(tmp_path / 'out')
    encoder = encoding.get_encoder()
    assert found(TEXTS)['input_ids'] == [encoder.encode(text) for text in TEXTS]
    assert (found.pad_token_id, found.eos_token_id) == (encoding.n_vocab, encoding.eot_token)
    assert (found.padding_side, found.model_max_length) == ('right', 20)
    assert found(['a', 'the quick'], padding=True)['input_ids'][0][-1] == encoding.n_vocab


@pytest.mark.parametrize('name', ['main', 'test', 'reviews'])
def test_own_encodings_become_tokenisers(tmp_path, name):
    from transformers import AutoTokenizer

    if name == 'main':
        require_bpe()
    encoding = encodings.by_name(name)
    tokeniser.write_tokeniser(encoding, 20, str(tmp_path))
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    found = AutoTokenizer.from_pretrained(tmp_path)
    texts = ['the film was quite good'] if name == 'reviews' else [*TEXTS, encodings.END_OF_TEXT]
    encoder = encoding.get_encoder()
    assert found(texts)['input_ids'] == [encoder.encode(text) for text in texts]
    assert found.pad_token_id == encoding.n_vocab


def test_there_is_no_chat_template_and_the_padding_has_a_name_of_its_own(tmp_path):
    from transformers import AutoTokenizer

    words = ['film', tokeniser.PADDING]
    encoding = tokenisers.read(write_words(tmp_path / 'in', words, chat_template='{{ 1 }}'))
    tokeniser.write_tokeniser(encoding, 20, str(tmp_path))
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found.chat_template is None
    assert (found.pad_token, found.pad_token_id) == (f'<{tokeniser.PADDING}>', encoding.n_vocab)
    text = f'film {tokeniser.PADDING}'
    assert found(text)['input_ids'] == encoding.get_encoder().encode(text)


def test_the_command_score_gives_the_same_scores(tmp_path, families):
    lines = [
        {'query': query, 'response': f' {" ".join([word] * count)}'}
        for query in SENTENCES[:2]
        for word in ('fox', 'Bär', '<s>')
        for count in (1, 28)
    ]
    (tmp_path / 'texts.jsonl').write_text('\n'.join(map(json.dumps, lines)))

    def scored(reward):
        printed = succeed(f'score {reward} {tmp_path}/texts.jsonl').stdout
        return torch.tensor([json.loads(line)['score'] for line in printed.splitlines()])

    save_reward_model(tmp_path / 'run/reward_model', families('llama', max_position_embeddings=256))
    lengths = {'task__query_length': 100, 'task__response_length': 150}
    write_settings(tmp_path / 'run', 'train_reward', 'test', ranks=1, **lengths)
    own, found = scored(tmp_path / 'run'), scored(exported(tmp_path / 'run', tmp_path / 'out'))
    assert (found - own).abs().max() <= 1e-5 * own.abs().max()
    assert len(own) == len(lines) and own.std() > 0.1


def test_what_is_written_and_said(tmp_path):
    save_reward_model(tmp_path / 'run/reward_model')
    result = succeed(['export', f'{tmp_path}/run', f'{tmp_path}/my model'])
    names = ['README.md', 'config.json', 'model.safetensors', 'tokenizer.json']
    written = sorted(path.name for path in (tmp_path / 'my model').iterdir())
    assert written == [*names, 'tokenizer_config.json']
    told = f'Saved {tmp_path}/run to {tmp_path}/my model, with a model card, README.md\n'
    assert result.stdout == told
    again = ['export', f'{tmp_path}/my model', f'{tmp_path}/again']
    assert 'is already a sequence classifier for transformers: copy it' in error_of(invoke(again))


def test_the_reward_model_in_a_policys_checkpoint(tmp_path):
    """RUN/reward_model is that one where there is no such directory: --rewards.online."""
    run = tmp_path / 'run'
    saved = save_reward_model(run / 'policy')
    model = classifier_in(exported(run / 'reward_model', tmp_path / 'out'))
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[3, 1, 4]])).logits.item()
    found += model.config.reward_constant
    assert found == pytest.approx(own_reward(saved)([3, 1, 4]), rel=1e-5)


def test_what_cannot_be_a_classifier_is_refused(tmp_path, families):
    save_reward_model(tmp_path / 'run/reward_model', families('codegen'))
    told = error_of(invoke(f'export {tmp_path}/run {tmp_path}/out'))
    assert 'which transformers lacks for models of the family codegen' in told
    assert not (tmp_path / 'out').exists()


def test_a_classifier_that_scores_otherwise_is_refused(tmp_path):
    trained = TrainedModel('test')
    network = trained.build(scope='reward_model', scalar_heads=['reward'])
    head = classifier.RewardHead(torch.ones(7, dtype=torch.float64), 0.5)
    made = classifier.classifier_of(trained.as_transformers(network), head, 27, 'mine')

    made.save_pretrained(tmp_path)
    tokens = [3, 1, 4]
    output = network.hidden(torch.tensor([tokens]))[0, -1]
    expected = output.double() @ head.weight + head.constant
    found = checks.scores_of(str(tmp_path), tokens) + made.config.reward_constant
    checks.check_numbers(str(tmp_path), found, expected)
    with pytest.raises(UserError, match=f'^{tmp_path}: the model that transformers loads is not'):
        checks.check_numbers(str(tmp_path), found, expected + 1)
