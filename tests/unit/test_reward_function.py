"""A reward that is a function of the user's: --rewards.function."""

import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import error_of, invoke, last_error_of, succeed
from experiments import resolved
from interrupted import TRAIN_MINIBATCH, failing
from launched import REPOSITORY
from ranks import on_ranks
from trainers import learner

from lm_human_preferences import lm_tasks, rewards
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.datasets import jsonl
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import evaluate
from lm_human_preferences.language import encodings
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import PART
from lm_human_preferences.reward_sources import loading, sources
from lm_human_preferences.reward_sources.function import FunctionScorer
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.reward_sources.texts import TextReward, joined
from lm_human_preferences.runs import reward_function, run_dir
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.training.loop import FailedElsewhere
from lm_human_preferences.utils import stop_signals

MOCK = """
from lm_human_preferences.language.encodings import Reviews
from lm_human_preferences.language.networks import reviews_model
from lm_human_preferences.synthetic import known_reward

def score(queries, responses):
    texts = [f'{query} {response}' for query, response in zip(queries, responses)]
    tokens = reviews_model.as_batch(Reviews.get_encoder(), texts)
    return known_reward.KnownReward(Reviews).score(tokens[:, :0], tokens)
"""
TEXTS = [joined('the film was', 'not very good'), joined('', 'bad')]


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr('sys.path', list(sys.path))

    def written(text, function='score'):
        path = tmp_path / 'my_reward.py'
        path.write_text(text, encoding='utf-8')
        return f'{path}:{function}'

    return written


def scores_of(name, texts=TEXTS):
    return FunctionScorer(reward_function.read(name)).score(texts)


@pytest.mark.parametrize(
    'expression',
    [
        'np.array([len(r) for r in responses])',
        'torch.tensor([float(len(r)) for r in responses], requires_grad=True).bfloat16()',
        '[torch.tensor(float(len(r))) for r in responses]',
    ],
)
def test_numbers_of_any_kind(write, expression):
    name = write(f'import numpy as np, torch\ndef score(queries, responses):\n return {expression}')
    assert torch.equal(scores_of(name), torch.tensor([13.0, 3.0]))


def test_what_it_reads(write):
    name = write('seen = []\ndef score(*texts):\n seen.extend(texts)\n return [0] * len(texts[0])')
    scorer = FunctionScorer(reward_function.read(name))
    reward = TextReward(scorer, encodings.Reviews)
    encode, padding = reward.encoder.encode, reward.padding_token
    queries = torch.tensor([[*encode('the film was'), padding], encode('overall the plot was')])
    responses = torch.tensor([[padding, padding], encode('good indeed')])
    assert torch.equal(reward.score(queries, responses), torch.zeros(2))
    seen = scorer._function.__globals__['seen']
    assert seen == [['the film was', 'overall the plot was'], ['', 'good indeed']]


def test_random_numbers_signals_and_streams_of_the_run_are_not_touched(write):
    seeds = 'torch.manual_seed(7); np.random.seed(7); random.seed(7)'
    name = write(
        f'import io, random, signal, sys, torch\nimport numpy as np\n{seeds}\n'
        'from lm_human_preferences.utils import stop_signals\n'
        f'def score(queries, responses):\n {seeds}\n'
        ' signal.signal(signal.SIGTERM, signal.SIG_DFL)\n'
        ' stop_signals.set_deadline(50)\n signal.alarm(0)\n'
        ' sys.stdout = sys.stderr = io.StringIO()\n return [random.random(), np.random.rand()]'
    )

    def state():
        return signal.getsignal(signal.SIGTERM), sys.stdout, sys.stderr

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    numbers = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with stop_signals.handled(stop_signals.interrupt, signal.SIGTERM):
        before = state()
        try:
            scores_of(name)
            assert state() == before and drawn() == numbers
            assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
        finally:
            stop_signals.set_deadline(None)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_processes_that_are_spawned_import_the_file(write):
    """As a pool does from Python 3.14 on."""
    name = write(
        'import multiprocessing\n'
        'def length(response):\n return len(response), __file__\n'
        'def score(queries, responses):\n'
        ' with multiprocessing.get_context("spawn").Pool(1) as pool:\n'
        '  lengths, files = zip(*pool.map(length, responses))\n'
        ' assert set(files) == {__file__}\n'
        ' return lengths'
    )
    scorer, _ = (FunctionScorer(reward_function.read(name)) for _ in range(2))  # and a judge
    assert scorer.score(TEXTS).tolist() == [13, 3]


FORKS = """
import os, signal, sys
from lm_human_preferences.reward_sources.function import FunctionScorer
from lm_human_preferences.reward_sources.texts import joined
from lm_human_preferences.runs import reward_function, run_dir
from lm_human_preferences.utils import stop_signals

run, name = sys.argv[1:]
lock = run_dir.held(run, ranks=1)
handled = stop_signals.handled(stop_signals.interrupt, signal.SIGINT, *stop_signals.TO_STOP)
with lock, handled:
    scores = FunctionScorer(reward_function.read(name)).score([joined('a', 'b')])
    assert scores.item() == 1, scores
    os.kill(os.getpid(), signal.SIGKILL)
"""
FORKING = """
import os, signal

def score(queries, responses):
    ready, told = os.pipe()
    if not os.fork():
        own = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
        assert {signal.getsignal(number) for number in own} == {signal.SIG_DFL}
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        os.setsid()
        os.write(told, str(os.getpid()).encode())
        signal.pause()  # outlives the run
    with open(f'{__file__}.child', 'wb') as file:
        file.write(os.read(ready, 9))
    if not (other := os.fork()):
        return [2]  # a mistake: this process is not the run
    return [os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])]
"""


def test_processes_that_are_forked_have_nothing_of_the_run(write, tmp_path):
    name = write(FORKING)
    words = [sys.executable, '-c', FORKS, str(tmp_path / 'run'), name]
    with open(tmp_path / 'output', 'w') as output:  # the child that lasts would keep a pipe open
        done = subprocess.run(words, cwd=REPOSITORY, stdout=output, stderr=output, timeout=60)
    assert done.returncode == -signal.SIGKILL, (tmp_path / 'output').read_text()
    child = int((tmp_path / 'my_reward.py.child').read_text())
    try:
        run_dir.check_free(str(tmp_path / 'run'))
    finally:
        os.kill(child, signal.SIGTERM)


@pytest.mark.parametrize(
    'body, told',
    [
        ('return None', 'returned None, not a number for each response'),
        ('return [1]', 'returned numbers of shape (1,), not (2,)'),
        ("return [1, '2']", "returned [1, '2'], not a number for each response"),
        ('return [1, -1e38]', 'returned -1e+38 for response 1 of 2: a reward must be finite'),
        ("return [1, float('nan')]", 'returned nan for response 1 of 2'),
        ("return {'short': [1]}", "the component 'short' of the reward is wrong: the function"),
        (
            "raise KeyError('x\\ny')",
            "calling it raised KeyError: 'x\\ny' (my_reward.py, line 3, in score)",
        ),
        ('import sys; sys.exit()', 'calling it raised SystemExit (my_reward.py, line 3, in score)'),
    ],
)
def test_mistakes_of_a_call_are_one_line(write, body, told):
    name = write(f'import torch\ndef score(queries, responses):\n {body}')
    with pytest.raises(UserError) as raised:
        scores_of(name)
    assert str(raised.value).startswith(f'reward function {name} {told}'[:40])
    assert told in str(raised.value) and '\n' not in str(raised.value)


@pytest.mark.parametrize(
    'text, told',
    [
        ('def scores(queries, responses): pass', 'the file has no function score'),
        ('def score(text): pass', 'must take two lists of texts, queries and responses, in'),
        ('def score(responses, queries): pass', 'the name responses suggests swapped parameters'),
        ('def score(:', 'loading its file raised SyntaxError: invalid syntax'),
    ],
)
def test_mistakes_of_the_file_are_one_line(write, text, told):
    with pytest.raises(UserError) as raised:
        scores_of(write(text))
    assert told in str(raised.value) and '\n' not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=f'{tmp_path}/none.py: no such file'):
        reward_function.read(f'{tmp_path}/none.py:score')
    with pytest.raises(UserError, match='only run from a file on this machine'):
        reward_function.read('hf://a/b/c.py:score')


DIRECT = '--rewards.train_new_model=off'


@pytest.mark.parametrize(
    'words, told',
    [
        ([DIRECT, '--rewards.function=a.py:f', '--rewards.trained_model=mock'], 'give one reward'),
        ([DIRECT, '--rewards.function=a.py'], '--rewards.function a.py: give FILE.py:FUNCTION'),
        (
            [DIRECT, '--rewards.function=a.py:f', '--rewards.class_name=x'],
            '--rewards.class_name x: give --rewards.trained_model DIRECTORY',
        ),
    ],
)
def test_options_that_contradict_each_other(tmp_path, words, told):
    result = invoke(['train_policy', 'test', 'x', '--mpi=1', f'--save_dir={tmp_path}', *words])
    assert error_of(result).startswith(told)


def train(folder, name, *words):
    return invoke(
        [
            'train_policy', 'mock_sentiment', name, '--mpi=1', f'--save_dir={folder}',
            '--run.log_interval=1', '--run.console=original', '--run.save_interval=1',
            '--run.evaluate=off', '--ppo.batch_size=64', '--ppo.total_episodes=128', DIRECT, *words,
        ]
    )  # fmt: skip


def saved(directory):
    bundle = Bundle(checkpoints.latest(f'{directory}/policy/checkpoints'))
    return {name: bundle[name] for name in bundle if not name.endswith('_time')}


@pytest.fixture(scope='module')
def known(tmp_path_factory):
    """A run that learned from the known reward."""
    folder = tmp_path_factory.mktemp('known')
    assert train(folder, 'run', '--rewards.trained_model=mock').exit_code == 0
    return folder / 'run'


def test_a_run_learns_from_a_function_that_each_command_names(write, known, tmp_path):
    name = write(MOCK)
    run, option = f'{tmp_path}/run', f'--rewards.function={name}'
    with failing(TRAIN_MINIBATCH, 7, KeyboardInterrupt):
        assert train(tmp_path, 'run', option).exit_code == 130
    told = error_of(invoke(['resume', run]))  # tests/faults tries the other commands
    assert f'repeat --rewards.function {name} (to read the code, see the copy' in told
    assert told.endswith(f'{run}/reward_function.py)')
    result = succeed(['resume', run, option])
    assert 'Going on from' in result.stdout and 'has changed since' not in result.stderr
    ours, theirs = saved(run), saved(known)
    assert ours.keys() == theirs.keys()
    for variable, value in theirs.items():
        np.testing.assert_array_equal(ours[variable], value)
    assert (tmp_path / 'run/reward_function.py').read_text() == MOCK
    (tmp_path / 'my_reward.py').write_text(f'{MOCK} # another one')
    reward_function.read.cache_clear()  # as in another command
    result = succeed(['resume', run, option])
    assert f'note: {name} has changed since this run began; see {run}' in result.stderr
    (tmp_path / 'my_reward.py').unlink()
    reward_function.read.cache_clear()
    assert f'{tmp_path}/my_reward.py: no such file' in error_of(invoke(['resume', run, option]))


def sampler_of(comm, score):
    """A trainer that samples four responses, two at a time."""
    hparams = resolved('train_policy', 'test', {'ppo.micro_batch_size': 2})
    trainer = learner(Policy(TrainedModel('test'), scope='policy'), hparams, comm)
    trainer.query_sampler = lambda: {'tokens': torch.ones(4, 3, dtype=torch.int64)}
    trainer.score_fn = lambda queries, responses: (torch.ones(2), responses, score())
    return trainer


def test_a_part_counts_where_there_is_one():
    """Only the second call on the second rank names the part b."""

    def work(comm):
        calls = iter([[1, 2], [3, 4]])

        def score():
            values = torch.tensor(next(calls))
            is_last = comm.rank == 1 and values[0] == 3
            return {f'{PART}a': values, **({f'{PART}b': values * 10} if is_last else {})}

        trainer = sampler_of(comm, score)
        trainer.sample()
        return trainer.part_means

    assert on_ranks(2, work) == [{f'{PART}a': 2.5, f'{PART}b': 35}] * 2


def test_an_error_on_one_rank_undoes_the_step_on_all():
    """Before any weight has changed; the others wait for the end that the one brings."""

    def work(comm):
        def score():
            if comm.rank:
                raise ConnectionError
            return {}

        trainer = sampler_of(comm, score)
        with pytest.raises(ConnectionError if comm.rank else FailedElsewhere):
            trainer.step()
        return trainer.is_undone, trainer.steps_done

    assert on_ranks(2, work) == [(True, 0)] * 2


def test_ranks_score_their_own_shares_alike(write):
    """Rank 0 reads the file for all; another rank may not see it."""
    hparams = resolved('train_policy', 'mock_sentiment')
    hparams.rewards.train_new_model = None
    hparams.rewards.function = write(MOCK)
    model = lm_tasks.initial_model('reviews')
    encode = model.encoding.get_encoder().encode
    queries = torch.tensor([encode('the film was')])
    responses = torch.tensor([encode('not very good')])

    def work(comm):
        source = source_of(hparams).pinned(comm)
        reward = source.for_training(comm, SimpleNamespace(trained_model=model))
        return rewards.make_score_fn(hparams.task, reward)(queries, responses)[0]

    known = KnownReward(model.encoding).score(queries, responses)
    assert all(torch.equal(scores, known) for scores in on_ranks(2, work))


def test_it_judges_a_run(write, known, capsys):
    name = write('def score(queries, responses):\n return [len(r) for r in responses]')
    results = evaluate.evaluate(str(known), judge=name, queries=2, samples=64)
    assert list(results['rewards']) == ['known reward', 'judge']
    assert 8 < results['rewards']['judge']['policy']['reward'] < 20
    told = capsys.readouterr().out
    assert f'\njudge: {name}\n' in told and 'best of 4 by judge' in told
    with pytest.raises(UserError, match='^--judge /none.py: no such file'):
        evaluate.evaluate(str(known), judge='/none.py:f')


def test_a_function_reads_a_chat_without_its_marks(monkeypatch):
    told = []

    def made(scorer, encoding, *, chat):
        told.append(chat)
        return TextReward(scorer, encoding, chat=chat)

    monkeypatch.setattr(sources, 'TextReward', made)
    hparams = resolved('train_policy', 'test', {'task.chat': True})
    code = reward_function.Source('x.py:score', 'def score(queries, responses): return [0]')
    source = sources.FunctionSource(code.name, hparams.task, 1, code=code)
    source.for_training(Comm(), SimpleNamespace(trained_model=TrainedModel('test')))
    assert told == [True]


PARTS = """
def score(queries, responses{more}):
    seen.append(({columns}))
    return {returned}
seen = []
"""


@pytest.mark.parametrize(
    'returned, scores, parts',
    [
        ('{"score": [3, 4], "short": [1, 2]}', [3, 4], {'short': [1, 2]}),
        ('{"short": [1, 2], "kind": [0.5, 1]}', [1.5, 3], {'short': [1, 2], 'kind': [0.5, 1]}),
        ('([3, 4], {"short": [1, 2]})', [3, 4], {'short': [1, 2]}),
    ],
)
def test_a_function_may_name_the_parts_of_a_score(write, returned, scores, parts):
    name = write(PARTS.format(more='', columns='', returned=returned))
    scorer = FunctionScorer(reward_function.read(name))
    found, named = scorer.score_and_parts([joined('q', 'a'), joined('q', 'b')])
    assert found.tolist() == scores
    assert {name: values.tolist() for name, values in named.items()} == parts


@pytest.mark.parametrize(
    'more, columns, seen',
    [
        (', **columns', 'columns', {'id': ['7', '8'], 'answer': ['x', None]}),
        (', *, answer, scale=2', 'answer, scale', (['x', None], 2)),
    ],
)
def test_a_function_gets_the_columns_that_it_asks_for(write, more, columns, seen):
    name = write(PARTS.format(more=more, columns=columns, returned='[1, 2]'))
    scorer = FunctionScorer(reward_function.read(name))
    rows = ({'id': '7', 'answer': 'x'}, {'id': '8'})
    scorer.score([joined('q', 'a', row) for row in rows])
    assert scorer._function.__globals__['seen'] == [seen]
    if 'answer' in more:
        with pytest.raises(UserError, match='takes answer, but the queries have no column'):
            scorer.score([joined('q', 'a')])


def test_columns_reach_a_function_by_the_tokens_of_their_query(tmp_path):
    """Of both parts of the file; queries that are cut are told apart by what is left of them."""
    (tmp_path / 'q.csv').write_text('query,answer\nabcd,1\nbcd,2\n')
    (tmp_path / 'q.test.csv').write_text('query,answer\ncab,3\n')
    task = resolved('train_policy', 'test', {'task.query_dataset': f'{tmp_path}/q.csv'}).task
    encoder = encodings.Test.get_encoder()
    found = lm_tasks.query_columns(task, encoder)
    texts = {encoder.decode(list(tokens)): row['answer'] for tokens, row in found.items()}
    assert texts == {'abc': '1', 'bcd': '2', 'cab': '3'}
    (tmp_path / 'q.csv').write_text('query,answer\nabcd,1\nabc,2\n')
    with pytest.raises(UserError, match='line 3: another record has the same query'):
        lm_tasks.query_columns(task, encoder)


def test_columns_of_queries_that_are_given_come_first(write):
    name = write('def score(queries, responses, answer):\n    return [*map(int, answer)]')
    reward = loading.load_reward_model(name, encodings.Test, may_be_code=True)
    reward.columns = {(1, 2): {'answer': '1'}, (1, 3): {'answer': '2'}}
    given = [((1, 2), jsonl.Query('here', 'ab', {'answer': '5'}))]
    loading.give_more_columns(reward, given)
    found = reward.score(torch.tensor([[1, 2], [1, 3]]), torch.tensor([[1], [1]]))
    assert found.tolist() == [5, 2]
    other = [((1, 2), jsonl.Query('there', 'ab', {'answer': '6'}))]
    with pytest.raises(UserError, match='there: another record has the same query'):
        loading.give_more_columns(reward, given + other)


@pytest.mark.parametrize(
    'body, told',
    [('return [1] * len(queries)', None), ("return answer + ['x']", "returned ['x', 'y', 'x']")],
)
def test_the_reward_function_is_called_once(tmp_path, body, told):
    (tmp_path / 'q.csv').write_text('query,answer\nabc,x\nabd,y\n')
    (tmp_path / 'r.py').write_text(f'def score(queries, responses, answer):\n    {body}\n')
    result = invoke(
        f'train_policy test a --dry_run --save_dir None --rewards.train_new_model off'
        f' --rewards.function {tmp_path}/r.py:score --task.query_dataset {tmp_path}/q.csv'
    )
    said = f'{tmp_path}/r.py:score gives two queries as their own responses 1, 1'
    assert said in result.stderr if told is None else told in last_error_of(result)
