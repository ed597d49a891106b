"""Responses that end early, with --task.stop: sampling, what counts in PPO, and what ends them."""

import copy
import json

import numpy as np
import pytest
import torch
from ranks import need, on_ranks
from tiny_causal_lms import save, tiny, write_chat_model
from tiny_tokenisers import END, write_byte_level
from trainers import learner_with, rollout_of

from lm_human_preferences import lm_tasks, ppo, train_policy
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, sample
from lm_human_preferences.language.sample import Decoding
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy

QUERY, LIMIT = 2, 6
LENGTHS = [1, 6, 3, 3, 5, 2, 6, 4]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<s>{% endfor %}"


@pytest.fixture(scope='module', params=['test', 'llama'])
def trained(request, tmp_path_factory):
    """GPT-2's own network, and one of transformers."""
    if request.param == 'test':
        return TrainedModel('test')
    return TrainedModel(str(write_chat_model(tmp_path_factory.mktemp('llama'))))


@pytest.fixture
def policy(trained):
    torch.manual_seed(1)
    policy = Policy(trained, temperature=0.7)
    torch.nn.init.normal_(policy.model.heads['value'].w)
    return policy


def ends_at(*tokens):
    return lambda sampled, position: torch.isin(sampled, torch.tensor(tokens))


def tokens(rows, columns, seed=0):
    return torch.randint(1, 25, (rows, columns), generator=torch.Generator().manual_seed(seed))


def test_rows_that_have_ended_leave_and_the_others_go_on_alike(policy, monkeypatch):
    """Greedily, so that the result does not depend on how many random numbers are drawn."""
    policy.temperature = 1e-6
    queries = tokens(8, QUERY)
    full = policy.respond(queries, LIMIT)
    ends = full['responses'][:4, 2].unique().tolist()  # some rows end early
    steps = []
    own = Decoding.step
    monkeypatch.setattr(
        Decoding, 'step', lambda rows, new, at: steps.append(len(new)) or own(rows, new, at)
    )
    policy.is_end = ends_at(*ends)
    results = [policy.respond(queries, LIMIT)]
    assert len(queries) > steps[-1]
    monkeypatch.setattr(sample, 'LEAVING', 2)  # none leaves
    results.append(policy.respond(queries, LIMIT))
    is_end = torch.isin(full['responses'], torch.tensor(ends))
    counts = is_end.cumsum(1) - is_end.long() == 0
    for result in results:
        mask = policy.mask_of(result['responses'])
        assert torch.equal(mask, counts)
        assert torch.equal(result['responses'][mask], full['responses'][mask])
        for name in ('logprobs', 'values'):
            torch.testing.assert_close(result[name][mask], full[name][mask], rtol=1e-4, atol=1e-5)
            assert not result[name][~mask].any()


def test_sampling_stops_when_all_have_ended(policy, monkeypatch):
    policy.is_end = lambda sampled, position: torch.full_like(sampled, position == 1).bool()
    own, steps = Decoding.step, []
    monkeypatch.setattr(Decoding, 'step', lambda *args: steps.append(1) or own(*args))
    responses = policy.respond(tokens(4, QUERY), LIMIT)['responses']
    assert len(steps) == 1 and policy.mask_of(responses).sum(1).tolist() == [2] * 4


def test_an_analysis_of_ended_responses_is_that_of_what_was_sampled(policy):
    queries = tokens(8, QUERY)
    policy.is_end = lambda sampled, position: sampled % 5 == 0
    torch.manual_seed(0)
    sampled = policy.respond(queries, LIMIT)
    mask = policy.mask_of(sampled['responses'])
    assert mask.all(1).any() and not mask.all()
    analysed = policy.analyze_responses(queries, sampled['responses'])
    for name in ('logprobs', 'values'):
        torch.testing.assert_close(analysed[name], sampled[name], rtol=1e-4, atol=1e-5)
    assert not analysed['entropies'][~mask].any() and analysed['entropies'][mask].all()


def trainer_of(policy, comm=None, **settings):
    common = {'ppo.batch_size': len(LENGTHS), 'ppo.nminibatches': 1, 'ppo.lr': 1e-3}
    common |= {'task.query_length': QUERY, 'task.response_length': LIMIT}
    return learner_with(copy.deepcopy(policy), {**common, **settings}, comm, ref_policy=policy)


def episodes(policy, lengths, limit=LIMIT):
    """Episodes whose responses have these lengths, as a policy near `policy` has sampled them."""
    rows = len(lengths)
    mask = torch.arange(limit) < torch.tensor(lengths)[:, None]
    responses = tokens(rows, LIMIT, 1)
    responses = torch.nn.functional.pad(responses, (0, limit - LIMIT), value=1)
    responses = responses.masked_fill(~mask, policy.padding_token)
    queries = tokens(rows, QUERY)
    outputs = policy.analyze_responses(queries, responses)
    noise = torch.randn(2, rows, LIMIT, generator=torch.Generator().manual_seed(2)) * 0.2
    noise = torch.nn.functional.pad(noise, (0, limit - LIMIT))
    scores = torch.randn(rows, generator=torch.Generator().manual_seed(3))
    logprobs = (outputs['logprobs'] + noise[0]).masked_fill(~mask, 0)
    values = (outputs['values'] + noise[1]).masked_fill(~mask, 0)
    rollout = rollout_of(
        queries=queries, responses=responses, logprobs=logprobs, values=values, scores=scores
    )
    rollout.ref_logprobs = outputs['logprobs']
    rollout.mask = mask
    rollout.rewards, _ = ppo.compute_rewards(scores, logprobs, outputs['logprobs'], 0.3, mask)
    return rollout


def update(trainer, rollout):
    """(statistics, gradients, parameters after) of one update."""
    trainer.optimizer.gradients.zero_grad = lambda: None  # the update would drop them
    stats = trainer.train_minibatch(rollout)
    parameters = trainer.policy.parameters_by_name()
    gradients = {name: each.grad for name, each in parameters.items()}
    return stats, gradients, {name: each.detach() for name, each in parameters.items()}


def test_a_longer_limit_that_nobody_uses_changes_nothing(policy):
    lengths = [min(length, 5) for length in LENGTHS]
    expected = update(trainer_of(policy), episodes(policy, lengths))
    trainer = trainer_of(policy, **{'ppo.micro_batch_size': 3})
    trainer.policy.model.gradient_checkpointing = True
    found = update(trainer, episodes(policy, lengths, limit=2 * LIMIT))
    for ours, theirs in zip(found, expected, strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_tokens_count_alike_on_whichever_rank_they_are(policy, monkeypatch):
    """Two ranks with episodes of different lengths, without the whitening, which is per rank."""
    need(2)
    monkeypatch.setattr(ppo, 'whiten', lambda values, shift_mean=True, mask=None: values)
    rollout = episodes(policy, LENGTHS)
    assert sum(LENGTHS[:4]) != sum(LENGTHS[4:])
    expected, gradients, _ = update(trainer_of(policy), rollout)

    def work(comm):
        """Update on this rank's half, in micro-batches of which one rank may skip more padding."""
        trainer = trainer_of(policy, comm, **{'ppo.micro_batch_size': 3})
        stats, found, _ = update(trainer, rollout[4 * comm.rank : 4 * comm.rank + 4])
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        names = ('loss/total', 'policy/entropy', 'policy/approxkl', 'val/error')
        means = comm.all_reduce_mean({name: float(stats[name]) for name in names})
        for name in names:
            assert means[name] == pytest.approx(float(expected[name]), rel=1e-4)

    on_ranks(2, work)


def test_an_update_by_hand():
    """In float64 and numpy, token by token, without functions of the program."""
    rng = np.random.default_rng(0)
    lengths, limit = [2, 4, 1], 4
    score, beta, lam = np.array([1.0, -0.5, 2.0]), 0.3, 0.9
    drawn = rng.normal(size=(6, 3, limit)) * 0.5
    logprobs, ref, values, new_logprobs, new_values, entropies = drawn
    rewards = np.full((3, limit), np.nan)
    for row, length in enumerate(lengths):
        rewards[row, :length] = -beta * (logprobs - ref)[row, :length]
        rewards[row, length - 1] += score[row]
    counted = ~np.isnan(rewards)
    spread = np.sqrt(rewards[counted].var() + 1e-8)
    centre = rewards[counted].mean()
    white = (rewards - centre) / spread + centre
    advantages = np.full((3, limit), np.nan)
    for row, length in enumerate(lengths):
        following = 0.0
        for t in reversed(range(length)):
            after = values[row, t + 1] if t + 1 < length else 0.0
            following = white[row, t] + after - values[row, t] + lam * following
            advantages[row, t] = following
    returns = advantages + values
    scaled = (advantages - advantages[counted].mean()) / np.sqrt(advantages[counted].var() + 1e-8)
    ratio = np.exp(new_logprobs - logprobs)
    policy_loss = np.maximum(-scaled * ratio, -scaled * ratio.clip(0.8, 1.2))[counted].mean()
    clipped = np.clip(new_values, values - 0.2, values + 0.2)
    value_loss = 0.5 * np.maximum((new_values - returns) ** 2, (clipped - returns) ** 2)
    expected = {
        'loss/policy': policy_loss,
        'loss/value': value_loss[counted].mean(),
        'loss/total': policy_loss + 0.1 * value_loss[counted].mean(),
        'policy/entropy': entropies[counted].mean(),
        'policy/approxkl': 0.5 * ((new_logprobs - logprobs)[counted] ** 2).mean(),
        'val/vpred': new_values[counted].mean(),
        'val/error': ((new_values - returns)[counted] ** 2).mean(),
        'returns/mean': returns[counted].mean(),
        'returns/var': returns[counted].var(),
        'val/mean': values[counted].mean(),
    }

    def ours(array):
        return torch.from_numpy(np.where(counted, array, 0))

    mask = torch.from_numpy(counted)
    rollout = rollout_of(
        queries=torch.zeros(3, 1, dtype=torch.int64),
        responses=torch.zeros(3, limit, dtype=torch.int64),
        logprobs=ours(logprobs),
        values=ours(values),
        mask=mask,
    )
    rollout.ref_logprobs = ours(ref)
    rollout.scores = torch.from_numpy(score)
    rollout.rewards, penalty = ppo.compute_rewards(
        rollout.scores, rollout.logprobs, rollout.ref_logprobs, beta, mask
    )
    hparams = train_policy.PpoHParams(lam=lam)
    minibatch = ppo.add_advantages(rollout, hparams)
    # What stands after the end must not matter, not even as NaN.
    outputs = {
        'logprobs': torch.from_numpy(np.where(counted, new_logprobs, np.nan)),
        'values': torch.from_numpy(np.where(counted, new_values, np.nan)),
        'entropies': torch.from_numpy(entropies),
    }
    _, stats = ppo.loss(minibatch, outputs, hparams)
    stats |= ppo.return_stats(minibatch)
    for name, value in expected.items():
        assert stats[name].item() == pytest.approx(value, rel=1e-12), name
    step = ppo.step_stats(rollout, beta, penalty, {})
    assert step['objective/kl'].item() == pytest.approx(
        np.where(counted, logprobs - ref, 0).sum(1).mean(), rel=1e-12
    )
    assert step['objective/response_length'].item() == pytest.approx(np.mean(lengths))


def encoder_of(directory, **files):
    write_byte_level(directory, bos_token='<s>', chat_template=TEMPLATE)
    for name, content in files.items():
        (directory / f'{name}.json').write_text(json.dumps(content))
    return tokenisers.read(str(directory)).get_encoder()


def task(**settings):
    lengths = {'query_length': 4, 'response_length': 4}
    return lm_tasks.TaskHParams(query_dataset='x.jsonl', **{**lengths, **settings})


@pytest.mark.parametrize(
    'files, ends',
    [
        ({}, {0}),  # the tokeniser's own
        ({'config': {'eos_token_id': 7}}, {7}),
        ({'config': {'eos_token_id': 7}, 'generation_config': {'eos_token_id': [8, 9]}}, {8, 9}),
        ({'generation_config': {'eos_token_id': None}, 'config': {'eos_token_id': [7]}}, {7}),
        ({'config': {'eos_token_id': 10**6}}, {0}),  # no token of this tokeniser
    ],
)
def test_ends_are_those_of_the_model_and_in_a_chat_those_of_its_template(tmp_path, files, ends):
    encoder = encoder_of(tmp_path, **files)
    start = {encoder.single_token('<s>')}
    assert lm_tasks.truncate_tokens(task(stop=True), encoder) == ends
    assert lm_tasks.truncate_tokens(task(chat=True), encoder) == ends | start
    assert lm_tasks.truncate_tokens(task(), encoder) is None
    assert lm_tasks.truncate_tokens(task(stop=True, truncate_token=3), encoder) == {3}


def test_what_was_found_is_named_and_where_nothing_is_the_options(tmp_path):
    encoder = encoder_of(tmp_path)
    (note,) = lm_tasks.end_notes(task(chat=True), encoder)
    assert note == f"A response ends with {END!r} (0), '<s>' (1), or after 4 tokens"
    assert lm_tasks.end_notes(task(chat=True, stop=False), encoder) == []
    without = encodings.Reviews.get_encoder()
    with pytest.raises(UserError, match=r'^--task.stop: .*give --task.truncate_text, or .* off$'):
        own = lm_tasks.PolicyHParams(initial_model='x')
        lm_tasks.end_notes(task(stop=True, policy=own), without)


def test_an_end_before_truncate_after_does_not_count(tmp_path):
    encoder, late = encodings.Test.get_encoder(), {'truncate_token': 3, 'truncate_after': 2}
    is_end = lm_tasks.policy_settings(task(stop=True, **late), encoder)['is_end']
    sampled = torch.tensor([3, 4])
    assert is_end(sampled, 1).tolist() == [False, False]
    assert is_end(sampled, 2).tolist() == [True, False]
    assert lm_tasks.policy_settings(task(truncate_token=3), encoder)['is_end'] is None


def test_greedy_answers_are_those_of_generate(tmp_path):
    write_byte_level(tmp_path)
    n_vocab = tokenisers.read(str(tmp_path)).n_vocab
    model = tiny('llama', vocab_size=n_vocab, max_position_embeddings=64)
    save(model, tmp_path)
    policy = Policy(TrainedModel(str(tmp_path)), temperature=1e-6)
    queries = tokens(6, QUERY)
    ends = policy.respond(queries, 20)['responses'][:3, [4, 9, 14]].diagonal().tolist()
    policy.is_end = ends_at(*ends)
    ours = policy.respond(queries, 20)['responses']
    theirs = model.eval().generate(
        queries,
        attention_mask=torch.ones_like(queries),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
    )[:, QUERY:]
    mask = policy.mask_of(ours)
    assert not mask.all() and not mask[:, theirs.shape[1] :].any()
    ours = ours.masked_fill(~mask, 0)
    assert torch.equal(ours[:, : theirs.shape[1]], theirs)
