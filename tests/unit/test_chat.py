"""language/texts/chat and datasets/messages: contexts by the chat template of a tokeniser."""

import dataclasses
import json

import pytest
import torch
from sample_files import write_lines
from tiny_tokenisers import END, write_byte_level, write_sentencepiece

from lm_human_preferences import lm_tasks
from lm_human_preferences.datasets import jsonl, messages
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.texts.tokenise import Tokeniser
from lm_human_preferences.language import encodings
from lm_human_preferences.language.networks.gpt2_files import HParams
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.texts.chat import ChatTemplate

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}"
    f'{END}\n'
    '{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}'
)
# As of many: no message of the system, and the roles in turn.
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    + TEMPLATE
)
DIALOGUE = [
    {'role': 'system', 'content': 'Be brief.\n\nAlways.'},
    {'role': 'user', 'content': 'Which dog is lazy?\n\n'},
    {'role': 'assistant', 'content': 'user: me'},
    {'role': 'user', 'content': ''},
]


def encoder_of(directory, write=write_byte_level, template=TEMPLATE):
    settings = {} if template is None else {'chat_template': template}
    return tokenisers.read(write(directory, bos_token='<s>', **settings)).get_encoder()


def task(path='x.jsonl', **settings):
    settings = {'chat': True, 'start_text': None, 'response_length': 2, **settings}
    return lm_tasks.TaskHParams(query_dataset=str(path), **{'query_length': 40, **settings})


def test_dialogues_are_texts_that_people_read():
    text = messages.as_text(DIALOGUE)
    assert text.startswith('system: Be brief.\n\nAlways.\n\nuser: Which dog')
    assert messages.as_messages(text) == DIALOGUE
    text = 'Hello.\n\nuser: me'
    assert messages.as_messages(text) == [{'role': 'user', 'content': text}]
    assert messages.as_plain([], 'x') is None


@pytest.mark.parametrize(
    'dialogue',
    [
        [{'role': 'user', 'content': 'a'}, {'role': 'critic', 'content': 'b'}],
        [{'role': 'user', 'content': 'assistant: a'}],
    ],
)
def test_messages_that_a_text_cannot_tell_apart_are_refused(tmp_path, dialogue):
    path = tmp_path / 'x.jsonl'
    path.write_text(f'"a"\n{json.dumps(dialogue)}\n')
    told = '(the messages of the query cannot be|a message has the role .critic., which is not one)'
    with pytest.raises(UserError, match=rf'^{path}, line 2: {told}'):
        jsonl.read_jsonl(str(path))


@pytest.mark.parametrize('write', [write_byte_level, write_sentencepiece])
@pytest.mark.parametrize('dialogue', [DIALOGUE, [{'role': 'user', 'content': ' the "dog" is.'}]])
def test_contexts_are_those_of_transformers(tmp_path, write, dialogue):
    from transformers import PreTrainedTokenizerFast

    encoder = encoder_of(tmp_path, write)
    query = tuple(encoder.encode(messages.as_text(dialogue)))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(dialogue, add_generation_prompt=True)['input_ids']
    assert ChatTemplate(encoder, '', '', 100).context(query) == expected
    assert expected.count(encoder.eot_token) == len(dialogue)


# Llama 3's template takes the white space around contents away.
TRIMMING = TEMPLATE.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize('template', [TEMPLATE, TRIMMING])
@pytest.mark.parametrize('begun', ['Sure:\n\nuser', ' The dog. ', f'a{END}b'])
def test_a_turn_of_the_assistant_goes_on(tmp_path, template, begun):
    from transformers import PreTrainedTokenizerFast

    encoder = encoder_of(tmp_path, template=template)
    dialogue = [*DIALOGUE[:2], {'role': 'assistant', 'content': begun}]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(dialogue, continue_final_message=True)['input_ids']
    query = tuple(encoder.encode(messages.as_text(dialogue)))
    context = ChatTemplate(encoder, '', '', 100).context(query)
    assert context == expected
    assert context[-1] != encoder.eot_token
    assert encoder.decode(context).rstrip().endswith(begun.rstrip())


def test_a_turn_of_the_assistant_with_nothing_in_it_begins(tmp_path):
    template = ChatTemplate(encoder_of(tmp_path, template=TRIMMING), '', '', 100)
    begun = [*DIALOGUE[:2], {'role': 'assistant', 'content': ' \n'}]
    queries = (template.encoder.encode(messages.as_text(each)) for each in (DIALOGUE[:2], begun))
    contexts = [template.context(tuple(query)) for query in queries]
    assert contexts[0] == contexts[1]


def test_prefix_and_suffix_belong_to_the_message(tmp_path):
    encoder = encoder_of(tmp_path)
    template = ChatTemplate(encoder, 'Shorten: ', ' Now!', 40)

    def text(query):
        return encoder.decode(template.context(tuple(encoder.encode(query))))

    assert text('the fox') == f'<s><|user|> Shorten: the fox Now!{END}\n<|assistant|> '
    assert 'Shorten' not in text('user: a\n\nassistant: b\n\nuser: c')


def test_a_response_given_as_a_text_ends_as_sampled_ones_do(tmp_path):
    encoding = tokenisers.read(write_byte_level(tmp_path, bos_token='<s>', chat_template=TEMPLATE))
    encoder = encoding.get_encoder()
    dog, end = encoder.encode(' lazy dog'), encoder.single_token(END)

    def tokens(text, length=12, **settings):
        of_task = task(response_length=length, **settings)
        return Tokeniser(encoding, of_task, 'cut', '--too_long').fitted('response', text, 'x')

    assert tokens(' lazy dog') == [*dog, end]
    assert tokens(f' lazy dog{END}', special_tokens=True) == [*dog, end]
    for length in (len(dog), len(dog) - 1):  # no room for an end, as in a sample that is cut off
        assert tokens(' lazy dog', length) == dog[:length]
    assert tokens(' lazy dog', stop=False) == tokens(' lazy dog', truncate_text='.') == dog


def test_contexts_have_one_length(tmp_path):
    encoder = encoder_of(tmp_path)
    hparams = task(query_length=9)
    rows = [encoder.encode(text) for text in ('the fox', 'a')]
    padded = torch.tensor([row + [encoder.padding_token] * (9 - len(row)) for row in rows])
    contexts = lm_tasks.query_formatter(hparams, encoder)(padded)
    assert contexts.dtype == torch.int64
    lines = [encoder.decode(row) for row in contexts]
    assert lines == [f'<s><|user|> {text}{END}\n<|assistant|> ' for text in ('the fox', 'a')]
    assert contexts.shape[1] == 9 + lm_tasks.chat_template(hparams, encoder).overhead
    sizes = HParams(n_vocab=30, n_ctx=contexts.shape[1] + 2)
    lm_tasks.check_lengths(hparams, encoder, sizes)
    with pytest.raises(UserError, match=r'tokens of the chat template are \d+, more than the'):
        lm_tasks.check_lengths(hparams, encoder, dataclasses.replace(sizes, n_ctx=sizes.n_ctx - 1))


def test_where_the_template_is(tmp_path):
    without = encoder_of(tmp_path, template=None)
    for encoder, told in [
        (without, 'default chat template: use a chat model, or leave --task.chat off'),
        (encodings.Test.get_encoder(), 'chat template; leave --task.chat off'),
    ]:
        with pytest.raises(UserError, match=f'^--task.chat: the model has no {told}'):
            lm_tasks.query_formatter(task(), encoder)


@pytest.mark.parametrize(
    'template', ["{{ raise_exception('never') }}", "{{ ''.__class__.__mro__ }}"]
)
def test_a_template_that_fails_is_told_before_anything_starts(tmp_path, template):
    encoder = encoder_of(tmp_path, template=template)
    with pytest.raises(UserError, match='^--task.chat: the chat template of the model fails: '):
        lm_tasks.check_lengths(task(), encoder, HParams(n_vocab=30, n_ctx=1000))


def test_dialogues_are_taken_whole_or_left_out(tmp_path):
    encoder = encoder_of(tmp_path, template=STRICT)
    short = [{'role': 'user', 'content': 'a. b'}, {'role': 'assistant', 'content': 'c'}]
    long = [*short, {'role': 'user', 'content': 'the lazy dog. ' * 9}]
    queries = [short, long, DIALOGUE[:2], 'a. the dog', 'x. ' + 'the lazy dog ' * 20, '', 'no stop']
    write_lines(tmp_path / 'x.jsonl', queries)
    (tmp_path / 'x.test.jsonl').write_text('"unused"\n')
    hparams = task(tmp_path / 'x.jsonl', start_text='.')
    sampler = lm_tasks.make_query_sampler(hparams=hparams, encoder=encoder, batch_size=9)
    found = {encoder.decode(row) for row in sampler()['tokens']}
    assert found == {messages.as_text(short), ' the dog'} | {
        text for text in found if text.startswith(' the lazy')
    }
    assert len(found) == 3
    assert lm_tasks.query_notes(hparams, encoder, 'train')[1:] == [
        '  cut by --task.start_text, --task.end_text or --task.query_length: 2',
        "  left out, without --task.start_text '.': 2",
        '  left out, too long for --task.query_length 40 in their contexts: 1',
        '  left out, refused by the chat template: 1',
    ]


def test_a_dialogue_whose_marks_take_too_much_room_is_left_out(tmp_path):
    encoder = encoder_of(tmp_path)
    template = ChatTemplate(encoder, '', '', 40)
    turns = [{'role': 'tool', 'content': ''}] * 5
    query = encoder.encode(messages.as_text(turns))
    assert len(query) <= 40 < template.length < len(template.context(tuple(query)))
    assert template.problem(query, query) == 'too_long'
    with pytest.raises(UserError, match=rf'but at most {template.length} are allowed: shorten'):
        template.contexts([query])


def test_queries_that_are_rendered_already_are_read_as_the_tokens_they_spell(tmp_path):
    encoder = encoder_of(tmp_path)
    path = tmp_path / 'x.jsonl'
    path.write_text(f'"Which dog?{END}"\n"Which dog?"\n')
    path.with_suffix('.test.jsonl').write_text('"Which dog?"\n')
    settings = {'chat': False, 'end_text': None}
    hparams = task(path, **settings)
    for special in (False, True):
        hparams.special_tokens = special
        sampler = lm_tasks.make_query_sampler(hparams=hparams, encoder=encoder, batch_size=2)
        assert (encoder.eot_token in sampler()['tokens']) == special


@pytest.mark.parametrize('write', [write_byte_level, write_sentencepiece])
@pytest.mark.parametrize('special', [False, True])
def test_special_tokens_in_prefix_and_suffix(tmp_path, write, special):
    """So a model that needs its BOS can have it."""
    encoder = encoder_of(tmp_path, write)
    affixes = {'query_prefix': '<s>the ', 'query_suffix': f' dog{END}<s>'}
    hparams = task(chat=False, stop=False, special_tokens=special, **affixes)
    query = encoder.encode('a fox')
    (padded,) = lm_tasks.query_formatter(hparams, encoder)(torch.tensor([query])).tolist()
    context = [token for token in padded if token != encoder.padding_token]
    whole = encoder.own(
        f'<s>the a fox dog{END}<s>', add_special_tokens=False, split_special_tokens=not special
    )
    assert context == whole['input_ids']
    (bos,) = encoder.with_special_tokens().encode('<s>')
    ends = (context[0] == bos, context[-1] == bos, context[-2] == encoder.eot_token)
    assert ends == (special,) * 3
    longest = len(padded) + (0 if encoder.adds_space else 40 - len(query))
    sizes = HParams(n_vocab=30, n_ctx=longest + 2)
    lm_tasks.check_lengths(hparams, encoder, sizes)
    with pytest.raises(UserError, match='tokens of prefix and suffix are'):
        lm_tasks.check_lengths(hparams, encoder, dataclasses.replace(sizes, n_ctx=sizes.n_ctx - 1))
