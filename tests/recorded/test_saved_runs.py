"""Models out of the original's run directories, against original_save_dir_*_inputs/analyze.npz."""

import json
import re

import pytest
from command_line import invoke, succeed
from compare import assert_close, assert_equal, tokens
from golden_data import found, load_json, load_npz, require, require_bpe, under
from trainers import hparams_of

from lm_human_preferences import lm_tasks
from lm_human_preferences.language import encodings
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import TrainedRewardModel
from lm_human_preferences.train_policy import HParams

ATOL = 2e-5
RUNS = [path.removesuffix('_inputs/analyze.npz') for path in found('*_inputs/analyze.npz')]


@pytest.fixture(params=RUNS)
def run(request):
    directory = require(request.param)
    if load_json(request.param, 'policy', 'encoding') == 'main':
        require_bpe()
    task = hparams_of(HParams, load_json(request.param, 'train_policy_hparams.json')).task
    return directory, task, load_npz(f'{request.param}_inputs', 'analyze.npz')


def policy_of(directory, task, temperature):
    model = TrainedModel('policy', savedir=str(directory / 'policy'), scope='policy')
    embed_queries = lm_tasks.query_formatter(task, model.encoding.get_encoder())
    return Policy(model, temperature=temperature, embed_queries=embed_queries)


def test_analyze_responses(run):
    directory, task, arrays = run
    queries, responses = tokens(arrays['queries']), tokens(arrays['responses'])
    temperatures = set(re.findall(r'policy_temperature_(.+?)/', ' '.join(arrays)))
    assert temperatures
    for temperature in sorted(temperatures):
        ours = policy_of(directory, task, float(temperature)).analyze_responses(queries, responses)
        recorded = under(arrays, f'policy_temperature_{temperature}/')
        assert set(ours) == set(recorded)
        for name, values in recorded.items():
            assert_close(ours[name], values, rtol=1e-5, atol=ATOL, name=f'{name} at {temperature}')


def test_greedy_responses(run):
    directory, task, arrays = run
    policy = policy_of(directory, task, temperature=0)
    ours = policy.respond(tokens(arrays['queries']), task.response_length)
    assert_equal(ours['responses'], arrays['greedy/responses'])
    assert_close(ours['values'], arrays['greedy/values'], rtol=1e-5, atol=ATOL)


def test_rewards(run):
    directory, task, arrays = run
    encoding = TrainedModel('policy', savedir=str(directory / 'policy')).encoding
    model = TrainedRewardModel(str(directory), encoding)
    scored = {'rewards': 'responses', 'rewards_padded_responses': 'padded_responses'}
    for key, responses in scored.items():
        scores = model.score(tokens(arrays['queries']), tokens(arrays[responses]))
        assert_close(scores, arrays[key], rtol=1e-5, atol=ATOL, name=key)
    assert_close(model.reward_gain, arrays['reward_gain'], rtol=0)
    assert_close(model.reward_bias, arrays['reward_bias'], rtol=0)


def test_score_with_a_published_reward_model(server, blobs, tmp_path):
    """`./launch.py score` gives what was recorded, by the original's run in the public storage."""
    directory = require('original_save_dir_test')
    arrays = load_npz('original_save_dir_test_inputs', 'analyze.npz')
    published = blobs['openaipublic/lm-human-preferences']
    for file in directory.rglob('*'):
        if file.is_file():
            published[f'runs/test/{file.relative_to(directory)}'] = file.read_bytes()
    for name in [name for name in published if name.startswith('runs/test/reward_model/')]:
        published[name.replace('runs/test', 'runs/bare')] = published[name]
    encoder = encodings.Test.get_encoder()
    text = lambda ids: encoder.decode(ids[ids != encoder.padding_token])  # noqa: E731
    texts = tmp_path / 'texts.jsonl'
    records = [
        {'query': text(query), 'response': text(response)}
        for query, response in zip(arrays['queries'], arrays['responses'], strict=True)
    ]
    texts.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
    run = 'az://openaipublic/lm-human-preferences/runs/test'
    for path in (run, f'{run}/reward_model', run.replace('az://openaipublic', 'gs:/')):
        result = succeed(f'score {path} {texts}')
        scores = [json.loads(line)['score'] for line in result.stdout.splitlines()]
        assert_close(scores, arrays['rewards'], rtol=1e-5, atol=ATOL, name=path)
    # The settings of the run say how long its texts are.
    result = invoke(f'score az://openaipublic/lm-human-preferences/runs/bare/reward_model {texts}')
    assert result.exit_code == 2
    assert 'has no train_reward_hparams.json' in result.stderr.splitlines()[-1]
