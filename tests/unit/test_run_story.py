"""run_story: what is known about a run, its command, its summary, and the card of its models."""

import dataclasses
import json
import math
import os
import shutil

import pytest
from label_folders import make_folder
from page_rules import sections_of, words_of
from run_folders import (
    EVALUATION,
    EXPERIMENTS,
    summary_of,
    told,
    write_alarm,
    write_curves,
    write_events,
    write_learned,
    write_run,
    write_settings,
)
from test_label_folder import answer_all

from lm_human_preferences import storage
from lm_human_preferences.commands import dry_run
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.plan.making import reward_phase
from lm_human_preferences.report_page import label_section, render
from lm_human_preferences.run_story import command_lines, facts, label_facts, model_card
from lm_human_preferences.runs import run_files, run_lock
from lm_human_preferences.utils.hyperparams import option

NEW = '--rewards.train_new_model'
(OWN,) = EVALUATION['rewards'].values()


def run_facts(hparams, experiment, **more):
    command = hparams.command
    field = 'policy' if command == 'train_policy' else 'reward'
    return facts.RunFacts('run', experiments={command: experiment}, **{field: hparams}, **more)


def evaluated(run, **results):
    storage.write_json(str(run / run_files.RESULTS), {**EVALUATION, **results})


def card_of(run, *, has_policy=True, constant=0.0):
    from huggingface_hub import ModelCard  # here, as it takes a second to import

    found = facts.read_run(str(run))
    page = model_card.card(found, str(run), has_policy=has_policy, constant=constant)
    card = ModelCard(page)
    return card.text, card.data.to_dict()


def test_a_command_line_tells_no_folder_key_or_name_of_a_labeller():
    line = (
        './launch.py train_reward test mine --labels.source=/home/anna/secret/labels'
        ' --labels.without anna --save_dir /home/anna/save'
        ' --task.policy.initial_model=https://x.blob.core.windows.net/a/m?sig=secret'
    )
    assert command_lines.for_others(line) == (
        './launch.py train_reward test mine --labels.source=labels --labels.without NAMES'
        ' --save_dir save --task.policy.initial_model=https://x.blob.core.windows.net/a/m'
    )
    line = 'train --labels.without anna --mpi 1 --run.serve.labellers=anna --labels.without'
    assert command_lines.without_names(line) == line.replace('anna', command_lines.NAMES)
    assert command_lines.for_others("an open ' quote") == command_lines.NAMES


FOUR = {'rewards__train_new_model__labels__held_out': 0.2, 'rewards__ensemble': 4}
ONLINE = {'rewards__online': 'on', 'rewards__online__labels': 50}
EXAMPLE = {'task__response_length': 40, 'task__policy__temperature': 0.7}
POLICY = {**OWN['policy'], 'standard_errors': {'share': 0.01, 'kl': 0.1}}
# Settings that differ from the experiment `test`, {statistic: its last value but one}, evaluation.
RUNS = {
    'plain': ({}, {}, {}),
    'of_hub': ({'task__policy__initial_model': '355M'}, {}, {}),
    'suffix': ({'task__query_prefix': 'P\n', 'task__query_suffix': "'S", **EXAMPLE}, {}, {}),
    'chat': ({'task__chat': True, **EXAMPLE}, {}, {}),
    'lora': ({'task__policy__lora': 'on'}, {}, {}),
    'embedding': ({'task__policy__lora': 'on', 'task__policy__lora__full': 'wte'}, {}, {}),
    'first': (FOUR, {'train_reward/held_out/effective_labels': 7}, {}),
    'mean': (FOUR, {'train_reward/held_out_of_mean/accuracy': -0.25}, {}),
    'errors': (
        {**ONLINE, 'rewards__online__source': 'mock', 'rewards__online__error': 0.25},
        {},
        {},
    ),
    'early': ({'ppo__total_episodes': 5000}, {'elapsed/episodes': 127}, {}),
    'all': ({'ppo__total_episodes': 5000}, {'elapsed/episodes': 5055}, {}),
    'older': ({}, {'elapsed/updates': 19}, {'step': 12}),
    'newest': ({}, {'elapsed/updates': 19}, {'step': 20}),
    # 2.04 standard errors, of 32 queries; also in files of earlier versions.
    'sure': ({}, {}, {'queries': 32, 'rewards': {'reward model': {**OWN, 'policy': POLICY}}}),
    'far': ({}, {'objective/kl': 63.5}, {}),
    'broken': ({}, {'ppo/loss/total': math.nan}, {}),
    'retrained': ({}, {'online/model': 1}, {}),
    'without': ({'rewards__train_new_model__labels__without': 'anna,bert'}, {}, {}),
    'damaged': ({}, {}, {'rewards': 3}),
}
FACTS = [
    ('plain', 'card', '# plain: a policy'),
    ('plain', 'card', 'up to 3 tokens'),
    ('plain', 'card', 'a KL of 6.5 nats from the initial model, a mean score of 2.25.'),
    ('plain', 'card', '1024 labels of the type best\\_of\\_4 that the program made up'),
    ('plain', 'card', '87.5 % of the labels that were held out of its training.'),
    ('plain', 'card', 'policy        2.000   1.500            2.000              71.4%'),
    ('plain', 'card', 'transformers 5'),
    ('plain', 'card', 'versions of the libraries: not recorded'),
    ('plain', 'reward card', '32 at a time, at a learning rate of 0.001'),
    ('plain', 'reward card', 'Add 2.5 to each score'),
    ('plain', 'summary', ' learned in 6,400 episodes of PPO'),
    ('of_hub', 'card', 'began as openai-community/gpt2-medium.'),
    ('suffix', 'card', "between 'P\\\\n' and \"'S\""),
    # As in training; a BOS would be part of the prefix.
    ('suffix', 'card', 'generate("P\\nThe beginning of a text\'S", max_new_tokens=40,\n'),
    (
        'suffix',
        'card',
        'temperature=0.7, top_k=0, top_p=1.0, repetition_penalty=1.0, add_special_tokens=False)',
    ),
    ('chat', 'card', "generate([{'role': 'user', 'content': 'A question'}], max_new_tokens=40,\n"),
    ('chat', 'card', 'temperature=0.7, top_k=0, top_p=1.0, repetition_penalty=1.0)'),
    ('chat', 'card', 'sampled up to its end'),
    ('chat', 'reward card', 'dialogue'),
    ('lora', 'card', 'rank 8 (LoRA) learned'),
    ('embedding', 'card', 'rank 8 (LoRA), and wte in full, learned'),
    ('first', 'card', 'first of the 4 reward models'),
    ('first', 'card', '87.5 % of the labels that were held out of its training (a share of 0.2 '),
    ('first', 'card', 'interval is 52.9 to 97.8 %'),  # Wilson's for 8 labels
    ('mean', 'card', 'mean of the 4 reward models prefers'),
    ('mean', 'card', '75.0 % of the labels that were held out of its training (a share of 0.2 '),
    ('errors', 'card', '25.0 % are answers at random'),
    ('early', 'card', ' 5056 episodes in batches of 64'),
    ('early', 'summary', ' learned in 128 of 5,056 episodes of PPO'),
    ('early', 'summary', 'an early end, after 128 of 5,056 episodes'),
    ('all', 'summary', ' learned in 5,056 episodes of PPO'),
    ('older', 'card', 'step 12 of 20'),
    ('older', 'summary', 'step 12 of 20'),
    ('older', 'page', 'step 12 of 20'),
    ('sure', 'summary', '71.4 ± 2.0 % of the gain'),
    ('sure', 'summary', 'Each ± is a 95 % interval.'),
    ('far', 'summary', 'a KL of 64.50 at the end, where the target was 6.'),
    ('broken', 'summary', 'statistics that end as NaN'),
    ('broken', 'page', 'ppo/loss/total is not a finite number from step 1 on'),
    ('retrained', 'page', 'its reward model was trained again before steps 1, 2.'),
    ('without', 'card', 'The answers of 2 more were left out.'),
    ('damaged', 'card', 'its evaluation are damaged'),
]
ABSENT = [
    ('plain', 'card', 'evaluation.json'),
    ('plain', 'card', '/tmp'),
    ('plain', 'reward card', 'evaluat'),
    ('all', 'summary', 'early end'),
    ('newest', 'summary', 'of 20'),
]


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    """{(run, place): text} of all RUNS."""
    found = {}
    for name, (settings, values, evaluation) in RUNS.items():
        run = write_run(tmp_path_factory.mktemp('runs') / name, **settings)
        write_curves(
            run / 'tb/ppo', {'x': [0, 0], **{tag: [each, each + 1] for tag, each in values.items()}}
        )
        evaluated(run, **evaluation)
        found[name, 'card'] = card_of(run)[0]
        found[name, 'reward card'] = card_of(run / 'reward_model', has_policy=False, constant=2.5)[
            0
        ]
        found[name, 'page'] = words_of(render.page([str(run)], EXPERIMENTS))
        found[name, 'summary'] = summary_of(run)
    return found


@pytest.mark.parametrize('run, place, fact', FACTS)
def test_a_fact_is_told_of_its_run_alone(texts, run, place, fact):
    assert fact in texts[run, place]
    assert run == 'plain' or fact not in texts['plain', place]


@pytest.mark.parametrize('run, place, fact', ABSENT)
def test_what_does_not_belong_there_is_absent(texts, run, place, fact):
    assert fact not in texts[run, place]


def test_what_cards_say_to_machines(tmp_path):
    run = write_run(tmp_path / 'run', task__policy__initial_model='org/name@abc')
    text, metadata = card_of(f'{run}/reward_model', has_policy=False)
    assert metadata['pipeline_tag'] == 'text-classification' and 'Add ' not in text
    assert metadata['base_model'] == 'org/name'
    assert card_of(run)[1] == {
        'library_name': 'transformers',
        'pipeline_tag': 'text-generation',
        'tags': ['rlhf', 'ppo', 'lm-human-preferences'],
        'base_model': 'org/name',
    }


def test_the_best_evaluation_is_told_with_its_settings(tmp_path):
    run = write_run(tmp_path / 'run')
    (run / 'evaluation.json').unlink()
    name = 'evaluation-queries_8-samples_64-judge_mock.json'
    storage.write_json(str(run / name), {**EVALUATION, 'queries': 8})
    page = sections_of(render.page([str(run)], EXPERIMENTS))
    for text in (page['How far from the best possible'], card_of(run)[0]):
        assert 'settings: queries 8, samples 64, judge mock.' in text
        assert '9 responses to each of 8 queries' in text
    assert '71.4 % of the gain' in page['What happened']
    assert 'not been evaluated' not in ' '.join([card_of(run)[0], *page.values()])
    # Exact ones first, then those of most queries, then the newest; those of an older policy last.
    sampled = {**EVALUATION, 'exact': False, 'queries': 64}
    storage.write_json(str(run / 'evaluation-queries_64.json'), sampled)
    evaluated(run)
    assert facts.read_run(str(run)).evaluation_settings.startswith('queries 8')
    evaluated(run, queries=8)
    os.utime(run / name, (2, 2))
    assert facts.read_run(str(run)).evaluation_settings == ''
    os.utime(run / 'evaluation.json', (1, 1))
    assert facts.read_run(str(run)).evaluation_settings.startswith('queries 8')
    (run / 'policy/checkpoints').mkdir(parents=True)
    os.utime(run / 'policy/checkpoints', (3, 3))
    assert facts.read_run(str(run)).evaluation_settings == 'queries 64'


def test_a_judge_that_the_policy_has_learned_from_is_told(tmp_path):
    """A member of its ensemble, or the reward model that it was given."""
    run, other = write_run(tmp_path / 'run'), write_run(tmp_path / 'other')
    rewards = {'rewards__train_new_model': 'off', 'rewards__trained_model': str(other)}
    given = write_run(tmp_path / 'given', **rewards)
    for place, judges, has_learned in [
        (run, [run / 'reward_model_1', f'{run}/reward_model/'], True),
        (run, [other / 'reward_model', 'mock'], False),
        (given, [other / 'reward_model_2', other], True),
        (given, [run / 'reward_model'], False),
    ]:
        for judge in judges:
            evaluated(place, judge=str(judge), rewards={'reward model': OWN, 'judge': OWN})
            text = summary_of(place)
            assert ('by the judge, a reward that it has learned from, ' in text) == has_learned
            assert ('by the judge, another reward, ' in text) != has_learned


def test_a_negative_correlation_with_held_out_ratings_has_no_interval(tmp_path):
    run = tmp_path / 'run'
    write_settings(run, 'train_reward', 'test', ranks=1)
    tags = {
        'train_reward__held_out__agreement': -1.2,
        'train_reward__held_out__effective_labels': 51,
    }
    write_events(run / 'tb/reward_model', **tags)
    found = facts.read_run(str(run)).held_out
    assert found.value == pytest.approx(-0.2) and found.interval is None


def test_a_judge_is_the_function_of_the_run_however_its_path_is_spelt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = f'{tmp_path}/reward.py:score'
    run = write_run(tmp_path / 'run', rewards__train_new_model='off', rewards__function=function)
    read = facts.read_run(str(run))
    for judge in (function, 'reward.py:score', './reward.py:score', 'run/reward_function.py:score'):
        assert read.has_learned_from(judge)
    assert not read.has_learned_from('reward.py:other') and not read.has_learned_from('score')


@pytest.mark.parametrize('more', [{'effective_samples': 9}, {'share': 1.516}])
def test_a_share_that_cannot_be_is_not_told(tmp_path, more):
    run = write_run(tmp_path / 'run')
    evaluated(run, rewards={'reward model': {**OWN, 'policy': {**OWN['policy'], **more}}})
    assert facts.read_run(str(run)).share_of_gain is None and 'of the gain' not in summary_of(run)


@pytest.mark.parametrize(
    'settings, kind, fact',
    [
        ({'function': '/x/own.py:score'}, 'reward function', "of the user's, own.py:score."),
        ({'trained_model': 'hf://org/name', 'class_name': 'GOOD'}, 'classifier', "class 'GOOD'."),
        ({'trained_model': '{local}'}, 'classifier', 'was given to the run, as local.'),
        ({'trained_model': 'mock'}, 'known reward', 'The reward is a known function of the text'),
    ],
)
def test_a_reward_that_is_not_a_reward_model_is_not_called_one(tmp_path, settings, kind, fact):
    """A classifier has learned from some labels; for the others there are none, and none missed."""
    local = tmp_path / 'local'
    config = {'architectures': ['BertForSequenceClassification']}
    storage.write_json(str(local / 'config.json'), config)
    given = {f'rewards__{key}': each.format(local=local) for key, each in settings.items()}
    run = write_run(tmp_path / 'run', rewards__train_new_model='off', **given)
    write_alarm(run / 'tb/ppo', 1, 'an alarm')
    shutil.rmtree(run / 'tb/reward_model')
    card, page = card_of(run)[0], words_of(render.page([str(run)], EXPERIMENTS))
    assert 'Alarm at step 1 of the policy: an alarm.' in page
    for text in (page, card):
        assert kind in text and 'reward model' not in text.replace('not a model that', '')
    assert fact in card and 'labels of' not in card
    assert ('Which labels' in card) == (kind == 'classifier')


def test_a_model_that_does_not_belong_to_a_run(tmp_path, monkeypatch):
    """Not even where the program is started in a run."""
    write_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    text, metadata = card_of('124M')
    assert metadata['base_model'] == 'openai-community/gpt2'
    assert 'How this model was trained' in text.partition('What is not known')[2]
    assert facts.read_run('reward_model') == facts.read_run('.')
    assert 'base_model' not in card_of(tmp_path, has_policy=False)[1]


def test_labels_of_people(tmp_path):
    """How many gave them and how far they agree, of the answers that were learned; no name."""
    folder = tmp_path / 'answers'
    make_folder(folder, 4, labellers=2)
    answer_all(folder, 'anna_secret', 1)
    answer_all(folder, 'bert_secret', 1)
    opened = LabelFolder(str(folder))
    labellers = {'anna_secret': 4, 'bert_secret': 4}
    lines = opened.lines_read()
    make_folder(folder, 2, seed=1, labellers=2)
    answer_all(folder, 'anna_secret', 1)
    answer_all(folder, 'bert_secret', 3)  # of which the model knows nothing
    run = write_run(tmp_path / 'run', 'train_reward', labels__source=str(folder))
    write_learned(run, source=str(folder), found=8, answers=lines, labellers=labellers)
    text = card_of(run, has_policy=False)[0]
    assert '8 labels of the type best\\_of\\_4 of the folder answers.' in text
    assert '2 labellers gave them.' in text
    assert ' 100.0 % of 4 pairs of answers to 4 questions (95 % interval' in text
    shutil.rmtree(folder)
    later = card_of(run, has_policy=False)[0]
    assert 'How far the labellers agree' in later and '2 labellers gave them.' in later
    assert 'secret' not in text + later and str(tmp_path) not in text + later


def test_labels_that_people_gave_while_the_policy_trained(tmp_path):
    run = write_run(tmp_path / 'run', rewards__online='on', rewards__online__labels=50)
    make_folder(run / 'labels', 3, labellers=2)
    answer_all(run / 'labels', 'anna', 0)
    answers = {'anna': 3, 'bert': 0}  # who has opened the page and left
    lines = [
        json.dumps({'model': 1, 'step': 0, 'labels': 1, 'answers': {'anna': 1}}),
        json.dumps({'model': 2, 'step': 5, 'labels': 3, 'answers': answers}),
        json.dumps({'trained': 2, 'step': 5, 'loss': 1.0}),
        '{"model": 3, "st',  # a kill has torn the last line, which hides none of the others
    ]
    (run / 'labels/used.jsonl').write_text('\n'.join(lines))
    text = card_of(run)[0]
    for fact in (
        '3 labels of the type best\\_of\\_4 that people gave while the policy trained.',
        '1 labeller gave them.',
        '2 reward models were trained in turn',
        'no question has two answers',
    ):
        assert fact in text, fact


@dataclasses.dataclass
class TwoSources(reward_options.LabelHParams):
    """Labels from a second place besides, as CONTRIBUTING's map says how to add one."""

    more: str | None = option(None, 'as source')

    def sources(self):
        return {**super().sources(), 'more': self.more}


@dataclasses.dataclass
class SettingsOfTwo(reward_options.HParams):
    labels: TwoSources = dataclasses.field(default_factory=TwoSources)


def test_all_sources_of_labels_are_told(tmp_path):
    for name, labeller, answer in (('first', 'anna', 0), ('second', 'bert', TIE)):
        make_folder(tmp_path / name, 2, task={'ties': True})
        answer_all(tmp_path / name, labeller, answer)
    hparams = SettingsOfTwo()
    hparams.override_from_dict(EXPERIMENTS['train_reward/test'])
    hparams.labels.source = f'{tmp_path}/first'
    hparams.labels.more = f'{tmp_path}/second'
    labels = label_facts.labels_of_training(str(tmp_path), hparams)
    found = facts.RunFacts(str(tmp_path), reward=hparams, labels=labels)
    assert 'of the folder first and of the folder second.' in told('labels', labels)
    page = label_section.labels(found, has_names=True)
    assert [row[:3] for row in [page['heads'], *page['rows']]] == [
        ['labeller', 'answers', 'ties'],
        ['anna', '2', '0'],
        ['bert', '2', '2'],
    ]
    hparams.labels.more = 'gs://bucket/more.json'
    assert dry_run.sources_elsewhere(reward_phase(hparams)) == [
        f'--labels.more {hparams.labels.more}'
    ]


def test_a_reward_model_of_another_run(tmp_path):
    """What is known of it is read there, if it is at hand."""
    given = write_run(tmp_path / 'given', 'train_reward')
    rewards = {'train_new_model': 'off', 'trained_model': f'{given}/reward_model'}
    run = write_run(tmp_path / 'run', **{f'rewards__{key}': each for key, each in rewards.items()})
    shutil.rmtree(run / 'tb/reward_model')
    text = card_of(run)[0]
    assert 'given to the run, as reward\\_model.' in text
    assert '1024 labels' in text and '87.5 %' in text
    shutil.rmtree(given)
    text = card_of(run)[0]
    assert 'Which labels the reward model learned from.' in text and '1024' not in text


def test_text_of_others_means_nothing_in_markdown(tmp_path):
    evil = '[x](http://y) <b> `c` *d* | _e_ # &amp; \\ \x1b[2J'
    run = write_run(tmp_path / 'run', 'train_reward', labels__source=f'{evil}\n# Head\n```')
    text = card_of(run, has_policy=False)[0]
    assert model_card.escaped(evil) in text and '<b>' not in text.replace("'", '').split('```')[0]
    assert '\n# Head' not in text and '\x1b' not in text
    assert model_card.escaped('a*b\n# c') == 'a\\*b \\# c'
    assert model_card.code_block(['a `b`'], 'sh') == '```sh\na `b`\n```'
    assert model_card.code_block(['```'], 'sh') == '````sh\n```\n````'


def test_a_run_that_is_still_training_has_not_ended_early(tmp_path):
    run = write_run(tmp_path / 'run')
    write_events(run / 'tb/ppo', elapsed__episodes=127)
    lock, _ = run_lock.acquire(str(run))
    with lock:
        text = summary_of(run)
    assert 'still training, after 128 of' in text and 'early end' not in text
