"""The model card of an export: facts about its run for machines and for people."""

import json

import pytest
from label_folders import answer_all, make_folder
from run_folders import EVALUATION, write_learned, write_run

from lm_human_preferences import storage
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.report import page
from lm_human_preferences.report.run import read_run


def card_of(run, *, has_policy=True, **more):
    """Return (text, metadata) of the card of a model in the run's directory, which it is put in."""
    from huggingface_hub import ModelCard  # here, as it takes a second to import

    directory = str(run).removesuffix('/reward_model')
    more = {'constant': 0.0, **more}
    page.write_card(directory, read_run(str(run)), str(run), has_policy=has_policy, **more)
    card = ModelCard.load(f'{directory}/README.md')
    return card.text, card.data.to_dict()


def test_what_a_card_says_to_machines(tmp_path):
    run = write_run(tmp_path / 'run')
    tags = ['rlhf', 'lm-human-preferences']
    kind = {'library_name': 'transformers', 'pipeline_tag': 'text-generation', 'tags': tags}
    assert card_of(run)[1] == kind
    metadata = card_of(f'{run}/reward_model', has_policy=False, is_adapter=True)[1]
    assert metadata['pipeline_tag'] == 'text-classification' and metadata['library_name'] == 'peft'


def test_a_card_has_the_facts_of_the_report(tmp_path):
    run = write_run(tmp_path / 'run')
    write_learned(run, source='test', found=1024, learned_from=1000, held_out=24, simulated=1024)
    text, _ = card_of(run)
    for fact in (
        '# run\n\nA language model. It was trained by PPO.',
        '- **1,024** labels are simulated: a program answered, not people.',
        '| Tokens of a response | 4 |',
        '| Learned from | 1,000 |\n| Held out | 24 |',
        '| Policy | KL, nats | reward model |\n| --- | --- | --- |\n| Before | 0.00 | 0.25 |',
        '| Fraction of the possible gain |  | 71 % |',
        '| The reward model, on labels it had not seen | 21 of 24 |',
        '| Other seeds | not measured |  |  |',
        '| transformers | 5',
    ):
        assert fact in text, fact
    reward_card, _ = card_of(run, has_policy=False, constant=2.5)
    assert 'Add 2.5 to' in reward_card and '## Results' not in reward_card


def test_a_card_has_no_text_of_a_label_no_name_and_no_folder(tmp_path):
    folder = tmp_path / 'answers'
    make_folder(folder, 4, labellers=2)
    answer_all(folder, 'anna_secret', 1)
    run = write_run(tmp_path / 'run', 'train_reward', labels__source=str(folder))
    write_learned(run, source=str(folder), found=4, answers=LabelFolder(str(folder)).lines_read())
    text, _ = card_of(run, has_policy=False)
    opened = LabelFolder(str(folder))
    query = next(iter(opened.questions.values())).tokens()['query']
    assert '| Source | answers |' in text and '| Labellers were told | ' in text
    assert 'secret' not in text and str(tmp_path) not in text
    assert opened.encoding().get_encoder().decode(query) not in text


@pytest.mark.parametrize(
    'settings, query, end',
    [
        (
            {'query_prefix': 'P\n', 'query_suffix': "'S"},
            '"P\\nA question\'S"',
            ', add_special_tokens=False)',
        ),
        ({'chat': True}, "[{'role': 'user', 'content': 'A question'}]", ')'),
    ],
)
def test_the_lines_that_run_a_policy_sample_as_the_training_did(tmp_path, settings, query, end):
    options = {f'task__{name}': value for name, value in settings.items()}
    options |= {'task__response_length': 40, 'task__policy__temperature': 0.7}
    text, _ = card_of(write_run(tmp_path / 'run', **options))
    way = 'do_sample=True, temperature=0.7, top_k=0, top_p=1.0, repetition_penalty=1.0'
    assert f'generate({query}, max_new_tokens=40,\n         {way}{end}\n```' in text


def test_a_model_that_does_not_belong_to_a_run(tmp_path, monkeypatch):
    write_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    page.write_card('.', read_run('124M'), '124M', has_policy=True)
    text = (tmp_path / 'run/README.md').read_text()
    assert 'Its training is not recorded.' in text and 'PPO' not in text
    assert read_run('reward_model').directory == read_run('.').directory


def test_texts_of_others_mean_nothing_in_markdown(tmp_path):
    evil = '[x](http://y) <b> `c` *d* | _e_ # &amp; \\ \x1b[2J{{ 7 * 7 }}'
    run = write_run(tmp_path / 'run', task__query_dataset=f'{evil}\n# Head\n```')
    (own, points), *others = EVALUATION['rewards'].items()
    assert own == 'reward model'
    rewards = {'a|b': points, **dict(others)}
    storage.write_json(str(run / 'evaluation.json'), {**EVALUATION, 'rewards': rewards})
    text, _ = card_of(run)
    for line in text.splitlines():
        assert not line.startswith('# ') or line == '# run'
    assert '<b>' not in text and '\x1b' not in text and '49' not in text and 'a\\|b' in text
    assert page.escaped('a*b\n# c') == 'a\\*b \\# c'
    assert len(page.escaped('x' * 10**6)) < 2100
    assert json.dumps(text)
