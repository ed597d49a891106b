"""Sampling against the recordings in sampling/: greedy and drawn."""

import re

import numpy as np
import pytest
import torch
from compare import assert_close, assert_equal, tokens
from golden_data import found, json_if_there, load_npz, npz_keys, require, require_bpe, under
from trainers import policy_for

from lm_human_preferences.commands.sample_policy import sample_policy
from lm_human_preferences.hparams.command_options import SampleHParams
from lm_human_preferences.language import sample
from lm_human_preferences.language.sample import Decoding
from lm_human_preferences.lm_tasks import TaskHParams
from lm_human_preferences.utils import core

INFO = json_if_there('sampling', 'sampling.json', default={})
KEYS = npz_keys('sampling', 'sampling.npz')
CASES = sorted({key.rpartition('/')[0] for key in KEYS if key.endswith('/tokens')})
ATOL = 1e-4


def cases(pattern):
    matches = ((case, re.fullmatch(rf'(?:inner_padding/)?{pattern}', case)) for case in CASES)
    return [(case, float(m[1])) for case, m in matches if m]


class Case:
    def __init__(self, name):
        self.arrays = load_npz('sampling', 'sampling.npz')
        self.recorded = under(self.arrays, f'{name}/')
        inner = name.startswith('inner_padding/')
        self.queries = tokens(self.arrays['queries_inner_padding' if inner else 'queries'])
        self.contexts = tokens(self.arrays['inner_padding/contexts' if inner else 'contexts'])
        self.length = INFO['response_length']
        self.tokens = tokens(self.recorded['tokens'])

    def responses(self):
        return self.tokens[..., -self.length :]


def policy_at(temperature):
    task = TaskHParams(query_prefix=INFO['query_prefix'], query_suffix=INFO['query_suffix'])
    return policy_for(task, temperature=temperature)


@pytest.fixture
def draw(monkeypatch):
    """Function that makes the next draws the columns of its argument, (batch, n)."""

    def force(responses):
        columns = iter(responses.unbind(-1))

        def forced(probs, uniform):
            column = next(columns, None)
            tokens, sums = core.sample_from_probs(probs, uniform)
            return tokens if column is None else column, sums

        monkeypatch.setattr(sample, 'sample_from_probs', forced)

    return force


def check(ours, recorded, names=('logprobs', 'values')):
    for name in names:
        assert_close(ours[name], recorded[name], atol=ATOL, name=name)


@pytest.mark.parametrize('name, temperature', cases(r'greedy_t(.+)')[::3])
def test_greedy(name, temperature):
    case = Case(name)
    ours = policy_at(temperature).respond(case.queries, case.length)
    assert_equal(ours['responses'], case.responses())
    check(ours, case.recorded)


@pytest.mark.parametrize('name, temperature', cases(r'sampled_t(.+)'))
def test_drawn(draw, name, temperature):
    """Log-probabilities and values of what was drawn, through the cache and in one pass."""
    case, policy = Case(name), policy_at(temperature)
    draw(case.responses())
    ours = policy.respond(case.queries, case.length)
    whole = torch.cat([policy.embed_queries(case.queries), ours['responses']], dim=1)
    assert_equal(whole, case.recorded['tokens'])
    check(ours, case.recorded)
    analyzed = policy.analyze_responses(case.queries, case.responses())
    check(analyzed, case.recorded)
    recorded = under(case.recorded, 'analyze_')
    check(analyzed, recorded, analyzed.keys() & recorded.keys())


@pytest.mark.parametrize('name, length', cases(r'length(\d+)'))
def test_lengths(name, length):
    """Defect 30: the original drew one token where none was asked for."""
    case, policy, length = Case(name), policy_at(1), int(length)
    rows = Decoding(policy.model, case.contexts, policy.padding_token, length)
    ours = sample.sample_sequence(rows=rows, outputs=policy._outputs, length=length)
    for name in ('tokens', 'logprobs', 'values'):
        assert ours[name].shape == (len(case.contexts), length)
    assert case.tokens.shape[1] == case.contexts.shape[1] + max(length, 1)


@pytest.mark.skipif('queries' not in KEYS, reason='no sampling/ in this set')
def test_temperature_0_can_be_analyzed():
    """Defect 32: the original divided by zero."""
    policy, queries = policy_at(0), tokens(load_npz('sampling', 'sampling.npz')['queries'])
    responses = policy.respond(queries, INFO['response_length'])['responses']
    analyzed = policy.analyze_responses(queries, responses)
    assert_close(analyzed['logprobs'], np.zeros(responses.shape), atol=1e-6)
    assert_close(analyzed['entropies'], np.zeros(responses.shape), atol=1e-6)


def blocks_of(text):
    """Return the lines before the first sample, and the samples, each [query, response]."""
    head, *samples = text.split('=' * 80 + '\n')
    return head.splitlines(), [sample.splitlines() for sample in samples]


@pytest.mark.parametrize(
    'recorded', [path.removeprefix('sampling/') for path in found('sampling/sample_*.stdout.txt')]
)
def test_sample_py(recorded, monkeypatch, capsys, tmp_path):
    """sample.py prints what was recorded; greedily where the temperature was given."""
    directory = recorded.removeprefix('sample_').partition('.')[0].removesuffix('_temperature')
    save_dir, greedy = require(directory), '_temperature.' in recorded
    require_bpe()
    (tmp_path / 'openaipublic').symlink_to(require('datasets', 'input').resolve())
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path))
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    head, samples = blocks_of(require('sampling', recorded).read_text(encoding='utf-8'))
    options = SampleHParams(save_dir=str(save_dir), seed=3, nsamples=len(samples))
    options.temperature, options.console = 1e-6 if greedy else None, 'original'
    sample_policy(options)
    ours_head, ours = blocks_of(capsys.readouterr().out)
    assert ours_head == head
    assert [len(block) for block in ours] == [2] * len(samples)
    assert [query for query, _ in ours] == [query for query, _ in samples]
    assert not greedy or ours == samples
