"""`./sample.py sample`: prompts, files of queries, --output, against independent computations."""

import json
import re
import shutil
import signal
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from command_line import error_of, invoke, succeed
from console import responses
from launched import Launch, eventually
from online_runs import lines_of

import sample
from lm_human_preferences.commands.sample_policy import rounds_of
from lm_human_preferences.commands.sampler import OF_CHOICE
from lm_human_preferences.language.encodings import Reviews
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import TrainedRewardModel

ENCODER = Reviews.get_encoder()
PROMPTS = ('the film was', 'the story was', 'the plot')
FIELDS = ['query', 'response', 'query_tokens', 'response_tokens', 'score', 'kl']


@pytest.fixture(scope='module')
def labelled_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('labelled')
    words = f'train_policy mock_sentiment run --mpi=1 --save_dir={folder} --run.evaluate=false'
    words += ' --ppo.total_episodes=1024 --ppo.lr=0.003 --run.save_interval=2'
    succeed(f'{words} --rewards.train_new_model.labels.num_train=256')
    return folder / 'run'


@pytest.fixture
def copied_run(labelled_run, tmp_path):
    return shutil.copytree(labelled_run, tmp_path / 'copy')


def sampled(run, *words):
    return succeed(['sample', f'--save_dir={run}', '--mpi=1', *words], sample.cli)


def prompts(*texts):
    return [f'--prompt={text}' for text in texts or PROMPTS]


def numbers(rows, name):
    return torch.tensor([row[name] for row in rows], dtype=torch.double)


def assert_near(found, expected, atol):
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=0)


def columns(rows):
    return (torch.tensor([row[f'{name}_tokens'] for row in rows]) for name in ('query', 'response'))


def logprobs_of(run, scope, temperature, rows):
    policy = Policy(TrainedModel('run', str(run / 'policy'), scope), scope=scope)
    queries, answers = columns(rows)
    whole = torch.cat([queries, answers], dim=1)
    tokens, mask = policy.model.mask_padding(whole, policy.padding_token)
    with torch.no_grad():
        logits = policy.model.logits(policy.model.hidden(tokens, mask)).double()
    logprobs = (logits / temperature).log_softmax(-1)[:, queries.shape[1] - 1 : -1]
    return logprobs.gather(2, answers.unsqueeze(2)).squeeze(2).sum(1)


def change_settings(run, group='task', **settings):
    path = run / 'train_policy_hparams.json'
    hparams = json.loads(path.read_text())
    hparams[group].update(settings)
    path.write_text(json.dumps(hparams))


@pytest.mark.parametrize('scope, temperature', [('policy', 0.5), ('ref_policy', None)])
def test_output_agrees_with_an_independent_computation(labelled_run, tmp_path, scope, temperature):
    """pi at the temperature of the sampling, rho at the task's, which is 1."""
    words = [f'--savescope={scope}', '--per_query=5', f'--output={tmp_path}/out.jsonl']
    if temperature is not None:
        words.append(f'--temperature={temperature}')
    result = sampled(labelled_run, *prompts(), *words)
    rows = lines_of(tmp_path / 'out.jsonl')
    assert all(list(row) == FIELDS for row in rows)
    assert [row['query'] for row in rows] == [prompt for prompt in PROMPTS for _ in range(5)]
    for row in rows:
        padded = ENCODER.encode(row['query']) + 5 * [ENCODER.padding_token]
        assert row['query_tokens'] == padded[:5]
        assert row['response'] == ENCODER.decode(row['response_tokens'])
    assert [(row['query'], row['response']) for row in rows] == responses(result.stdout)
    assert result.stderr == f'Saved the samples in {tmp_path}/out.jsonl\n'

    logprobs = logprobs_of(labelled_run, scope, temperature or 1, rows)
    kls = logprobs - logprobs_of(labelled_run, 'ref_policy', 1, rows)
    assert_near(numbers(rows, 'kl'), kls, 2e-5)
    assert (kls.abs() > 0.01).any() == (scope == 'policy')
    scores = TrainedRewardModel(str(labelled_run / 'reward_model'), Reviews).score(*columns(rows))
    assert_near(numbers(rows, 'score'), scores, 1e-5)
    assert scores.std() > 0.1


def test_what_follows_the_end_of_a_response_is_printed_and_not_saved_as_text(copied_run, tmp_path):
    """`score` then gives the scores of the samples."""
    token = ENCODER.encode('really')[0]
    change_settings(copied_run, truncate_token=token, penalty_reward_value=-7)
    words = ['--per_query=30', '--batch_size=40', '--temperature=3', '--seed=1']
    output = tmp_path / 'out.jsonl'
    printed = sampled(copied_run, *prompts(), *words, f'--output={output}').stdout
    rows = lines_of(output)
    cut = 0
    for row, (_, shown) in zip(rows, responses(printed), strict=True):
        tokens = row['response_tokens']
        end = tokens.index(token) + 1 if token in tokens else len(tokens)
        assert row['response'] == ENCODER.decode(tokens[:end])
        assert shown == ENCODER.decode(tokens)
        cut += end < len(tokens)
    assert 0 < cut < len(rows)
    scored = invoke(f'score {copied_run} {output}').stdout.splitlines()
    for row, line in zip(rows, scored, strict=True):
        assert (row['score'] == -7) == (token not in row['response_tokens'])
        if row['score'] != -7:
            assert json.loads(line)['score'] == pytest.approx(row['score'], abs=1e-5)


@pytest.mark.parametrize('words', [[], ['--savescope=ref_policy', '--judge=mock']])
def test_the_best_of_several_responses(labelled_run, tmp_path, words):
    """Of those that the same seed gives, with the mean of all."""
    words = [*prompts(), '--seed=3', *words]
    several = f'--per_query=5 --batch_size=15 --output={tmp_path}/all.jsonl'.split()
    sampled(labelled_run, *words, *several)
    best = f'--best_of=5 --batch_size=3 --output={tmp_path}/best.jsonl'.split()
    result = sampled(labelled_run, *words, *best)
    scores = numbers(lines_of(tmp_path / 'all.jsonl'), 'score').view(3, 5)
    rows = lines_of(tmp_path / 'best.jsonl')
    assert all(list(row) == [*FIELDS, *OF_CHOICE] for row in rows)
    for number, row in enumerate(rows):
        drawn = lines_of(tmp_path / 'all.jsonl')[number * 5 : number * 5 + 5]
        assert row['response'] == max(drawn, key=lambda each: each['score'])['response']
    assert_near(numbers(rows, 'score'), scores.max(1).values, 1e-5)
    assert_near(numbers(rows, 'mean_score'), scores.mean(1), 1e-5)
    score, rank, mean, kl = (rows[0][name] for name in ('score', *OF_CHOICE))
    told = f'(score {score:.2f}, rank {rank:g} of 5, mean {mean:.2f}, KL of the choice {kl:.2f})'
    assert result.stdout.splitlines()[3] == told
    printed = sampled(labelled_run, *words, *best[:-1]).stdout
    assert printed == result.stdout


OF_REVIEWS = '--model=reviews --task.chat=off --task.query_length=5 --task.response_length=3'


def test_a_model_without_a_run_is_the_initial_model_of_one(labelled_run):
    likely = [*prompts(), '--temperature=0']
    expected = sampled(labelled_run, '--savescope=ref_policy', *likely)
    words = ['sample', '--mpi=1', *OF_REVIEWS.split(), *likely, '--task.policy.lora=off']
    found = succeed(words, sample.cli)
    assert found.stdout == expected.stdout


def test_without_a_reward_model_the_score_is_null(tmp_path):
    words = f'train_policy mock_sentiment run --mpi=1 --save_dir={tmp_path} --run.evaluate=false'
    words += ' --ppo.total_episodes=256 --rewards.train_new_model=off --rewards.trained_model=mock'
    succeed(words)
    change_settings(tmp_path / 'run', 'rewards', trained_model=str(tmp_path / 'nowhere'))
    result = sampled(tmp_path / 'run', *prompts(), f'--output={tmp_path}/out.jsonl')
    note, said = result.stderr.splitlines()
    assert note.startswith('note: no reward model could be loaded, so score is null: ')
    assert said == f'Saved the samples in {tmp_path}/out.jsonl'
    rows = lines_of(tmp_path / 'out.jsonl')
    assert all(row['score'] is None and isinstance(row['kl'], float) for row in rows)


def test_prompts_come_before_the_file_and_in_their_order(labelled_run, tmp_path):
    path = tmp_path / 'queries.jsonl'
    path.write_text('"the acting was"\n"the music was"\n')
    words = [f'--queries={path}', *prompts(), '--per_query=2', '--batch_size=3']
    result = sampled(labelled_run, *words)
    queries = [query for query, _ in responses(result.stdout)]
    given = (*PROMPTS, 'the acting was', 'the music was')
    assert queries == [query for query in given for _ in range(2)]
    assert result.stdout.startswith('=' * 80 + '\n') and result.stderr == ''


@pytest.mark.parametrize('batch_size, ranks', [(3, 1), (1, 2), (8, 2)])
def test_prompts_are_gone_through_again_and_again(batch_size, ranks):
    for per_query, expected in ((1, [1, 2, 1, 2, 1, 2]), (2, [1, 1, 2, 2, 1, 1])):
        found = []
        comms = [SimpleNamespace(rank=rank, size=ranks) for rank in range(ranks)]
        queries = torch.tensor([[1], [2]])
        shares = [rounds_of(cycle(queries), per_query, batch_size, comm) for comm in comms]
        while len(found) < len(expected):
            batches = [next(rounds).flatten().tolist() for rounds in shares]
            assert all(len(batch) == batch_size for batch in batches)
            found += [query for row in zip(*batches, strict=True) for query in row]
        assert found[: len(expected)] == expected


@pytest.mark.parametrize('words', [[], prompts()])
def test_fewer_samples_are_the_beginning_of_more(labelled_run, words):
    """With the same seed; the original sampled whole batches, too."""
    most = responses(sampled(labelled_run, *words, '--seed=3', '--nsamples=6').stdout)
    found = responses(sampled(labelled_run, *words, '--seed=3', '--nsamples=5').stdout)
    assert found == most[:5]


def test_interrupted_sampling_is_quiet_and_its_output_complete(labelled_run, tmp_path):
    path = tmp_path / 'out.jsonl'
    words = [f'--save_dir={labelled_run}', '--mpi=2', f'--output={path}']
    launch = Launch(tmp_path, *words, command=('sample.py', 'sample'))
    eventually(lambda: path.exists() and len(path.read_bytes().splitlines()) > 20)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end_within(18) == 130
    assert launch.errors() == ''
    samples = re.sub(r'(?m)^\[mpiexec@.*\n', '', launch.output())  # its own words about Ctrl-C
    rows, printed = lines_of(path), responses(samples)
    assert path.read_text().endswith('\n') and len(rows) > 20
    whole = printed[:-1]  # of the last one a part may be missing: nobody passes it on any more
    assert whole == [(row['query'], row['response']) for row in rows][: len(whole)]


def mistake(run, *words):
    return error_of(invoke(['sample', f'--save_dir={run}', '--mpi=1', *words], sample.cli))


@pytest.mark.parametrize(
    'words, told',
    [
        (['--prompt', ' \n'], "--prompt ' \\n' is empty: the model needs at least one token"),
        (['--prompt', 'the xyzzy was'], "--prompt 'the xyzzy was': encoding 'reviews' has no word"),
        (['--prompt', 'film ' * 50], f"--prompt '{'film ' * 11}film has 50 tokens, but the"),
        (['--savescope', 'polcy'], '--savescope polcy: the checkpoint in RUN/policy has policy'),
        (['--queries', 'RUN/nothing.jsonl'], '--queries RUN/nothing.jsonl: no such file'),
        (['--task.query_length', '3'], 'give either --save_dir with a run of train_policy, such'),
        (['--output', 'RUN'], '--output RUN exists already: give another name'),
    ],
)
def test_mistakes(labelled_run, words, told):
    found = mistake(labelled_run, *(word.replace('RUN', str(labelled_run)) for word in words))
    assert found.lower().startswith(told.replace('RUN', str(labelled_run)).lower())


def test_texts_that_the_model_has_no_positions_for(copied_run):
    change_settings(copied_run, query_length=1000)
    told = '--task.query_length 1000 + --task.response_length'
    assert mistake(copied_run, '--prompt', 'the film was').startswith(told)


@pytest.mark.parametrize(
    'text, told', [('"the film was"\n\n"the xyzzy"\n', ', line 3: encoding'), ('', ' has no text')]
)
def test_mistakes_in_a_file_of_queries(labelled_run, tmp_path, text, told):
    path = tmp_path / 'queries.jsonl'
    path.write_text(text)
    assert mistake(labelled_run, f'--queries={path}').startswith(f'--queries {path}{told}')


def test_an_empty_prompt_will_do_where_the_task_puts_text_before_it(copied_run):
    change_settings(copied_run, query_prefix='the film was')
    result = sampled(copied_run, '--prompt=')
    line, query, response = result.stdout.splitlines()
    assert (line, query) == ('=' * 80, '') and len(response.split()) == 3


def test_a_mistake_leaves_no_output(labelled_run, tmp_path):
    mistake(labelled_run, '--prompt=xyzzy', f'--output={tmp_path}/out.jsonl')
    assert not (tmp_path / 'out.jsonl').exists()
