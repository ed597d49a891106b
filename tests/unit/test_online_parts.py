"""The parts of an online run: random streams, retrained reward models, answers as labels."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch
from experiments import resolved
from label_folders import HEADER, TASK, make_folder, random_questions, say

from lm_human_preferences import label_types, lm_tasks, train_policy
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.online_options import ServeHParams
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.folder import (
    EVERYBODY,
    LabelFolder,
    QuestionWriter,
)
from lm_human_preferences.labels.held_out import Prediction, split
from lm_human_preferences.language import encodings, trained_models
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.online import collection
from lm_human_preferences.online.questions import Queries, QuestionSampler, QuestionSource
from lm_human_preferences.online.retraining import ModelRetrainer
from lm_human_preferences.plan.phases import TrainPolicy, policy_phase, reward_phase
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.rewards import EnsembleReward, RewardModel, make_score_fn
from lm_human_preferences.runs import run_files
from lm_human_preferences.utils.core import random_stream, set_seed


def drawn():
    return np.random.rand(), torch.rand(()).item()


def test_a_random_stream_depends_on_its_key_alone_and_leaves_the_others():
    set_seed(1)
    expected = [drawn(), drawn()]
    set_seed(1)
    found = [drawn()]
    with random_stream(3, 'questions', 64):
        inside = drawn()
    found.append(drawn())
    assert found == expected
    with random_stream(3, 'questions', 64):
        assert drawn() == inside
    for key in [(3, 'questions', 128), (4, 'questions', 64), (3, 'reward model', 64)]:
        with random_stream(*key):
            assert drawn() != inside


def reward_hparams(**settings):
    small = {'batch_size': 8, 'labels.num_train': 64, 'normalize_samples': 64}
    return resolved('train_reward', 'test', {**small, **settings})


def retrainer_of(reward_models, ref_policy, hparams):
    return ModelRetrainer(
        reward=EnsembleReward(reward_models),
        ref_policy=ref_policy,
        phase=reward_phase(hparams),
        comm=Comm(),
        seed=7,
    )


@pytest.fixture
def retrainer():
    set_seed(0)
    model = TrainedModel('test')
    reward_model = RewardModel(model)
    ref_policy = Policy(model, scope='ref_policy')
    return retrainer_of([reward_model], ref_policy, reward_hparams())


def parameters(retrainer, number=0):
    named = retrainer.reward_models[number].parameters_by_name().items()
    return {name: parameter.detach().clone() for name, parameter in named}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_training_begins_anew(retrainer):
    labels = training_data.generate_labels(reward_hparams(), encodings.Test)
    before = parameters(retrainer)
    set_seed(5)
    expected = drawn()
    set_seed(5)
    first = retrainer.train(labels, step=3)
    assert drawn() == expected
    once = parameters(retrainer)
    retrainer.train({field: values[:32] for field, values in labels.items()}, step=4)
    other = parameters(retrainer)
    again = retrainer.train(labels, step=3)
    assert_equal(parameters(retrainer), once)
    assert again == first
    head = 'heads.reward.w'
    assert not torch.equal(once[head], before[head]) and not torch.equal(once[head], other[head])


def test_what_learned_scores(retrainer):
    labels = training_data.generate_labels(
        reward_hparams(**{'labels.num_train': 1024}), encodings.Test
    )
    retrainer.settings.lr = 0.01
    loss, held_out = retrainer.train(labels, step=0)
    queries = torch.randint(26, (512, 3))
    responses = retrainer.ref_policy.respond(queries, length=4)['responses']
    score_fn = make_score_fn(retrainer.settings.task, retrainer.reward)
    scores, _, _ = score_fn(queries, responses)
    assert scores.mean().item() == pytest.approx(0, abs=0.3)
    assert scores.std().item() == pytest.approx(1, abs=0.3)
    assert loss < math.log(4) and held_out is None
    assert not scores.requires_grad
    prediction = retrainer.predict(labels)
    assert prediction.labels == 1024 and prediction.accuracy > 0.4


def test_members_of_an_ensemble_are_retrained_one_after_another(retrainer):
    """The first as if it were alone; what they predict is by the mean of their rewards."""
    labels = training_data.generate_labels(reward_hparams(), encodings.Test)
    alone, _ = retrainer.train(labels, step=3)
    expected = parameters(retrainer)
    model = retrainer.ref_policy.trained_model
    members = [RewardModel(model), RewardModel(model)]
    ensemble = retrainer_of(members, retrainer.ref_policy, retrainer.settings)
    retrainer.settings.labels.held_out = 0.0
    loss, held_out = ensemble.train(labels, step=3)
    assert_equal(parameters(ensemble), expected)
    assert not torch.equal(parameters(ensemble, 1)['heads.reward.w'], expected['heads.reward.w'])
    assert not any(optimizer.state for optimizer in ensemble.optimizers)
    assert loss != alone and held_out is None
    # by the mean of both, of which the first has the same weights
    assert ensemble.predict(labels).agreement != retrainer.predict(labels).agreement
    retrainer.settings.labels.held_out = 0.25
    learned, held_out, _ = split(labels, retrainer.settings, encodings.Test.get_encoder())
    assert ensemble.train(labels, step=3)[1].labels == len(held_out['query'])
    found = parameters(ensemble)
    retrainer.settings.labels.held_out = 0.0
    ensemble.train(learned, step=3)
    assert_equal(parameters(ensemble), found)


def test_plans_count_a_reward_model_that_learns():
    hparams = resolved('train_policy', 'test')
    offline = source_of(hparams).networks
    hparams.override_from_dict({'rewards.online': 'on', 'rewards.online.labels': 96})
    online = source_of(hparams).networks
    assert (offline.frozen, online.frozen) == (('ref_policy', 'reward_model'), ('ref_policy',))
    assert offline.learning == online.learning == ('policy',)
    assert set(offline.scopes) == set(online.scopes)
    sizes = trained_models.test_hparams()
    hparams.rewards.ensemble = 3
    three = source_of(hparams).networks
    work = {'rows': 0, 'micro_batch_size': None, 'tokens': 1, 'predicted': 0}
    offline, online, three = (
        networks.memory(sizes, hparams.run, torch.device('cuda'), **work) / sizes.parameters()
        for networks in (offline, online, three)
    )
    # A gradient and two moments, beside the policy's, of the one that learns at a time
    assert (online - offline, three - online) == (3 * 4, 2 * 4)


class Sampler:
    def __init__(self):
        self.position = (0, 0)

    def seek(self, position):
        self.position = position

    def __call__(self):
        text = self.position[0] + 1
        text += text % 3 == 0
        self.position = (text, 0)
        return {'tokens': torch.tensor([[text]])}


@pytest.fixture
def numbered(monkeypatch):
    """Function that returns queries, each of one token, the number of its text."""
    monkeypatch.setattr(lm_tasks, 'make_query_sampler', lambda *_, **__: Sampler())
    return lambda: Queries(None, None, 'train', None)


def test_queries_go_on_after_the_last_that_was_asked(numbered):
    alone, again = numbered(), numbered()

    def texts(queries, count):
        return [query.texts_read for query in queries.take(count)]

    assert texts(alone, 5) == [1, 2, 4, 5, 7]
    alone.seek(4)  # among those that have been read
    again.seek(4)
    assert texts(alone, 4) == texts(again, 4) == [5, 7, 8, 10]
    alone.seek(2)
    assert texts(alone, 2) == [4, 5]


class Echo:
    encoder = encodings.Test.get_encoder()

    def __init__(self, own):
        self.own = own

    def respond(self, queries, length):
        return {'responses': torch.cat([queries, torch.full_like(queries, self.own)], dim=1)}


def sampler_of(label_type, micro_batch_size, **policies):
    policies = policies or {'a': Echo(20), 'b': Echo(21)}
    task = resolved('train_policy', 'test').task
    return QuestionSampler(policies, task, label_types.get(label_type), micro_batch_size)


def test_each_sample_is_of_its_own_policy_and_query(numbered):
    sampler = sampler_of('best_of_4', 3)
    assert sampler.names == ['a', 'a', 'b', 'b']
    queries = numbered().take(3)
    found = list(sampler.new_questions(queries, set()))
    assert [query for query, _ in found] == queries
    for query, tokens in found:
        text = query.texts_read
        assert list(tokens.values()) == [[text], [text, 20], [text, 20], [text, 21], [text, 21]]


def test_what_is_not_worth_asking_is_left_out_and_counted(numbered):
    first, second = numbered().take(2)
    sampler = sampler_of('best_of_2', None, a=Echo(20), b=Echo(20))
    assert list(sampler.new_questions([first, second], set())) == [] and sampler.equal == 2
    sampler, seen = sampler_of('best_of_2', None), set()
    found = list(sampler.new_questions([first, first, second], seen))
    assert [query for query, _ in found] == [first, second] and len(seen) == 2
    assert (sampler.equal, sampler.known) == (0, 1)


def asked_by_a_run(path, while_interrupted=None):
    """Return a run's questions, (id, texts read), if need be interrupted in step 2."""
    online = {'rewards.online': 'on', 'rewards.online.labels': 96}
    hparams = resolved('train_policy', 'test', online)
    task = {**TASK, 'task': hparams.task.to_nested_dict()}
    set_seed(1)
    phase = policy_phase(hparams)
    trainer = train_policy.build_trainer(phase, TrainedModel('test'), Comm())

    def ask(writer, step, count):
        source = QuestionSource(policy=trainer.policy, writer=writer, phase=phase, seed=3)
        source.ask(step, count)

    with QuestionWriter(str(path), task, encodings.Test) as writer:
        ask(writer, 0, 8)
        if while_interrupted:
            ask(writer, 1, 12)
            while_interrupted(writer)
        ask(writer, 1, 16)
        ask(writer, 2, 24)
        questions = writer.folder.questions.values()
    own = [each for each in questions if each.episode is not None]
    return [(each.id, each.texts_read) for each in own]


def test_questions_that_others_add_leave_those_of_a_run_what_they_are(tmp_path):
    def add_others(writer):
        gold = {'kind': 'gold', 'labellers': EVERYBODY, 'gold': 1, 'part': 'given', 'texts_read': 0}
        others = random_questions(task=writer.folder.task['task'])
        for header in (gold, {}):  # by `ask --gold`, and by `ask`
            writer.add([next(others) for _ in range(3)], [{**HEADER, **header}] * 3)

    alone = asked_by_a_run(tmp_path / 'alone')
    assert len(alone) == 24 and len({texts_read for _, texts_read in alone}) == 24
    assert asked_by_a_run(tmp_path / 'both', add_others) == alone


def test_answers_in_the_order_of_questions(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 1, seed=1)
    make_folder(path, 1, seed=2, labellers=2)
    make_folder(path, 1, seed=3, kind='validation')
    say(path, 'anna', ..., 1, 3)
    say(path, 'ben', 0, 2)
    folder = LabelFolder(str(path))
    answers = collection.collected(folder)
    said = [(answer.labeller, answer.value) for answer in answers]
    assert said == [('ben', 0), ('anna', 1), ('ben', 2)]
    assert collection.count_answered(folder) == (2, 0)
    assert folder.lines_read() == {'anna': 2, 'ben': 2}
    earlier = LabelFolder(folder.path, {'anna': 2})
    assert [answer.value for answer in collection.collected(earlier)] == [1]


def test_damaged_lines_of_used_answers_are_named(tmp_path):
    (tmp_path / 'used.jsonl').write_text('{"step": 2, "answers": 3, "digest": "x"}\n')
    with pytest.raises(UserError, match='used.jsonl, line 1 does not say from which answers'):
        collection.read_used(str(tmp_path / 'used.jsonl'))


def best_of_four(accuracy, labels):
    return Prediction(
        labels=labels,
        queries=labels,
        effective=labels,
        accuracy=accuracy,
        chance=0.25,
        agreement=0.0,
    )


USED = {'model': 2, 'step': 5, 'wanted': 8, 'labels': 9, 'answers': {'anna': 9}, 'digest': 'd'}


def test_the_line_of_a_training():
    found = best_of_four(0.5, 10)
    line = collection.line(USED, 3, 1.25, found)
    assert line == (
        'reward model 2 of 3, before step 6: 9 labels (8 wanted); loss 1.250; held out: as the'
        ' labeller in 50.0 % of 10 labels (95 % interval 23.7 to 76.3 %, for these labellers,'
        ' independent queries); chance is 25.0 %'
    )
    numbers = {'model': 2, 'wanted': 8, 'labels': 9, 'loss': 1.25}
    assert collection.statistics(USED, 1.25, None) == numbers
    assert collection.statistics(USED, 1.25, found) == {
        **numbers,
        'held_out_accuracy': 0.5,
        'held_out_effective_labels': 10,
    }


def test_a_cross_validation_is_not_called_held_out():
    """Nor has it an interval, as its heads learn from each other's labels."""
    found = dataclasses.replace(best_of_four(0.5, 10), is_cross_validated=True)
    line = collection.line(USED, 3, 1.25, found)
    assert line.endswith(
        '; cross-validated: as the labeller in 50.0 % of 10 labels; chance is 25.0 %'
    )
    statistics = collection.statistics(USED, 1.25, found)
    assert statistics['cross_validated_accuracy'] == 0.5
    assert not any(name.startswith('held_out') or 'effective' in name for name in statistics)


def test_a_run_owns_its_labels():
    pattern = run_files.written_by(['train_policy'])
    for name in ('task.json', 'questions.jsonl', 'used.jsonl', 'answers/anna.jsonl'):
        assert pattern.fullmatch(f'labels/{name}')
    for name in ('answers/a b.jsonl', 'answers/anna.json', 'notes.txt'):
        assert not pattern.fullmatch(f'labels/{name}')
    assert not run_files.written_by(['train_reward']).fullmatch('labels/task.json')


def test_mistakes_of_the_page_of_a_training_name_its_options(tmp_path):
    make_folder(tmp_path / 'labels')
    settings = train_policy.HParams()
    settings.run.serve = ServeHParams(port=0, labellers='me,a b')
    phase = TrainPolicy(settings, source=None)
    with pytest.raises(UserError) as caught, contextlib.ExitStack() as stack:
        collection.serve(str(tmp_path / 'labels'), phase, stack)
    assert '--run.serve.labellers ' in str(caught.value) and '--web' not in str(caught.value)
