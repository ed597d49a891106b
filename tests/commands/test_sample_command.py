"""`./sample.py sample` with prompts, files of queries and --output, against independent
computations."""

import itertools
import json
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from command_line import invoke
from console import responses
from launched import ONE_AND_TWO, Launch, eventually, needs_mpi

import sample
from lm_human_preferences.commands.sample_file import SampleFile
from lm_human_preferences.commands.sample_policy import rounds_of
from lm_human_preferences.language.encodings import Reviews
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import TrainedRewardModel
from lm_human_preferences.synthetic.known_reward import KnownReward

ENCODER = Reviews.get_encoder()
PROMPTS = ('the film was', 'the story was', 'the plot')
FIELDS = ['query', 'response', 'query_tokens', 'response_tokens', 'score', 'kl']


def trained(folder, *words):
    result = invoke(
        [
            'train_policy',
            'mock_sentiment',
            'run',
            '--mpi=1',
            f'--save_dir={folder}',
            '--run.evaluate=false',
            '--ppo.total_episodes=2048',
            *words,
        ]
    )
    assert result.exit_code == 0, result.output
    return folder / 'run'


@pytest.fixture(scope='module')
def labelled_run(tmp_path_factory):
    """A short run that has trained its own reward model."""
    return trained(
        tmp_path_factory.mktemp('labelled'),
        '--rewards.train_new_model.labels.num_train=256',
        '--ppo.lr=0.003',
    )


@pytest.fixture(scope='module')
def direct_run(tmp_path_factory):
    """A short run whose score is the known reward."""
    return trained(
        tmp_path_factory.mktemp('direct'),
        '--rewards.train_new_model=off',
        '--rewards.trained_model=mock',
        '--run.save_interval=4',
    )


@pytest.fixture
def copied_run(labelled_run, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(labelled_run, tmp_path / 'copy')


def sampled(run, *words):
    result = invoke(['sample', f'--save_dir={run}', '--mpi=1', *words], sample.cli)
    assert result.exit_code == 0, result.output
    return result


def saved(path):
    return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def prompts(*texts):
    return [f'--prompt={text}' for text in texts or PROMPTS]


def columns(rows):
    return (torch.tensor([row[f'{name}_tokens'] for row in rows]) for name in ('query', 'response'))


def logprobs_of(run, scope, temperature, rows):
    """Of each whole response, from the network's logits."""
    policy = Policy(TrainedModel('run', str(run / 'policy'), scope), scope=scope)
    queries, answers = columns(rows)
    tokens, mask = policy.model.mask_padding(
        torch.cat([queries, answers], dim=1), policy.padding_token
    )
    with torch.no_grad():
        logits = policy.model.logits(policy.model.hidden(tokens, mask)).double()
    logprobs = (logits / temperature).log_softmax(-1)[:, queries.shape[1] - 1 : -1]
    return logprobs.gather(2, answers.unsqueeze(2)).squeeze(2).sum(1)


def changed_task(run, **settings):
    path = run / 'train_policy_hparams.json'
    hparams = json.loads(path.read_text())
    hparams['task'].update(settings)
    path.write_text(json.dumps(hparams))


@pytest.mark.parametrize(
    'scope, temperature', [('policy', None), ('policy', 0.5), ('ref_policy', None)]
)
def test_output_agrees_with_an_independent_computation(labelled_run, tmp_path, scope, temperature):
    """pi at the temperature of the sampling, rho at the task's, which is 1."""
    words = [] if temperature is None else [f'--temperature={temperature}']
    result = sampled(
        labelled_run,
        *prompts(),
        '--per_query=5',
        f'--savescope={scope}',
        f'--output={tmp_path}/out.jsonl',
        *words,
    )
    rows = saved(tmp_path / 'out.jsonl')
    assert all(list(row) == FIELDS for row in rows)
    assert [row['query'] for row in rows] == [prompt for prompt in PROMPTS for _ in range(5)]
    for row in rows:
        assert (
            row['query_tokens'] == (ENCODER.encode(row['query']) + 5 * [ENCODER.padding_token])[:5]
        )
        assert row['response'] == ENCODER.decode(row['response_tokens'])
    assert [(row['query'], row['response']) for row in rows] == responses(result.stdout)
    assert result.stderr == f'Saved 15 samples in {tmp_path}/out.jsonl\n'

    logprobs = logprobs_of(labelled_run, scope, temperature or 1, rows)
    kls = logprobs - logprobs_of(labelled_run, 'ref_policy', 1, rows)
    torch.testing.assert_close(
        torch.tensor([row['kl'] for row in rows]).double(), kls, atol=2e-5, rtol=0
    )
    assert (kls.abs() > 0.01).any() == (scope == 'policy')
    scores = TrainedRewardModel(str(labelled_run / 'reward_model'), Reviews).score(*columns(rows))
    torch.testing.assert_close(
        torch.tensor([row['score'] for row in rows]), scores, atol=1e-5, rtol=0
    )
    assert scores.std() > 0.1


def test_greedy_samples_have_the_kl_of_what_always_comes(labelled_run, tmp_path):
    sampled(
        labelled_run,
        *prompts(),
        '--per_query=2',
        '--temperature=0',
        f'--output={tmp_path}/out.jsonl',
    )
    rows = saved(tmp_path / 'out.jsonl')
    assert [row['response'] for row in rows[::2]] == [row['response'] for row in rows[1::2]]
    expected = -logprobs_of(labelled_run, 'ref_policy', 1, rows)
    torch.testing.assert_close(
        torch.tensor([row['kl'] for row in rows]).double(), expected, atol=2e-5, rtol=0
    )


def test_scores_are_the_tasks(copied_run, tmp_path):
    """Responses are cut after a truncate token, and those without one score the penalty."""
    token, penalty = ENCODER.encode('really')[0], -7
    changed_task(copied_run, truncate_token=token, penalty_reward_value=penalty)
    sampled(
        copied_run,
        *prompts(),
        '--per_query=40',
        '--batch_size=40',
        '--temperature=3',
        '--seed=1',
        f'--output={tmp_path}/out.jsonl',
    )
    rows = saved(tmp_path / 'out.jsonl')
    cut = []
    for row in rows:
        answer = row['response_tokens']
        end = answer.index(token) + 1 if token in answer else len(answer)
        cut.append(
            {**row, 'response_tokens': answer[:end] + [ENCODER.padding_token] * (len(answer) - end)}
        )
    expected = TrainedRewardModel(str(copied_run / 'reward_model'), Reviews).score(*columns(cut))
    has_end = torch.tensor([token in row['response_tokens'] for row in rows])
    changes = torch.tensor([row != old for row, old in zip(cut, rows, strict=True)])
    assert has_end.any() and not has_end.all() and changes.any()
    expected[~has_end] = penalty
    torch.testing.assert_close(
        torch.tensor([row['score'] for row in rows]), expected, atol=1e-5, rtol=0
    )


def test_the_known_reward_is_a_reward_model_too(direct_run, tmp_path):
    sampled(direct_run, *prompts(), f'--output={tmp_path}/out.jsonl')
    rows = saved(tmp_path / 'out.jsonl')
    expected = KnownReward(Reviews).score(*columns(rows))
    torch.testing.assert_close(torch.tensor([row['score'] for row in rows]), expected)


def test_where_the_reward_model_is_gone_the_checkpoint_has_a_copy(
    copied_run, labelled_run, tmp_path
):
    shutil.rmtree(copied_run / 'reward_model')
    for run, name in ((copied_run, 'a'), (labelled_run, 'b')):
        assert (
            'note'
            not in sampled(run, *prompts(), '--seed=1', f'--output={tmp_path}/{name}.jsonl').stderr
        )
    assert saved(tmp_path / 'a.jsonl') == saved(tmp_path / 'b.jsonl')


def test_without_a_reward_model_the_score_is_null(direct_run, tmp_path):
    run = shutil.copytree(direct_run, tmp_path / 'copy')
    path = run / 'train_policy_hparams.json'
    hparams = json.loads(path.read_text())
    hparams['rewards']['trained_model'] = str(tmp_path / 'nowhere')
    path.write_text(json.dumps(hparams))
    result = sampled(run, *prompts(), f'--output={tmp_path}/out.jsonl')
    note, said = result.stderr.splitlines()
    assert note.startswith('note: no reward model could be loaded, so score is null: ')
    assert said == f'Saved 3 samples in {tmp_path}/out.jsonl'
    assert all(
        row['score'] is None and isinstance(row['kl'], float)
        for row in saved(tmp_path / 'out.jsonl')
    )


def test_warnings_are_no_samples(direct_run, tmp_path):
    """The newest checkpoint is damaged. Once for each model that is loaded from it."""
    run = shutil.copytree(direct_run, tmp_path / 'copy')
    (data,) = run.glob('policy/checkpoints/model.ckpt-8.data-*')
    data.write_bytes(data.read_bytes()[:-1])
    result = sampled(run, *prompts())
    assert re.fullmatch(
        'WARNING: .* is damaged: .*; using the checkpoint before it\n', result.stderr
    )
    assert result.stdout.startswith('=' * 80 + '\n') and len(responses(result.stdout)) == 3


# ---------------------------------------------------------------- queries, and how many samples


def test_prompts_come_before_the_file_and_in_their_order(labelled_run, tmp_path):
    path = tmp_path / 'queries.jsonl'
    path.write_text('"the acting was"\n"the music was"\n')
    result = sampled(
        labelled_run, f'--queries={path}', *prompts(), '--per_query=2', '--batch_size=3'
    )
    queries = [query for query, _ in responses(result.stdout)]
    assert queries == [
        query for query in (*PROMPTS, 'the acting was', 'the music was') for _ in range(2)
    ]
    assert result.stdout.startswith('=' * 80 + '\n') and result.stderr == ''


def test_nsamples_counts_samples(labelled_run):
    result = sampled(labelled_run, *prompts(), '--per_query=2', '--nsamples=3')
    assert [query for query, _ in responses(result.stdout)] == [PROMPTS[0]] * 2 + [PROMPTS[1]]
    result = sampled(labelled_run, *prompts(PROMPTS[0]), '--nsamples=4')
    assert [query for query, _ in responses(result.stdout)] == [PROMPTS[0]] * 4


def test_prompts_are_gone_through_until_there_are_enough_samples():
    queries = torch.tensor([[1], [2]])

    def rows(nsamples, per_query, batch_size, ranks=1):
        shares = [
            list(
                rounds_of(
                    queries, per_query, nsamples, batch_size, SimpleNamespace(rank=rank, size=ranks)
                )
            )
            for rank in range(ranks)
        ]
        assert all(len(part) <= batch_size for share in shares for part in share)
        return [
            row
            for rounds in zip(*shares, strict=True)
            for row in itertools.chain(
                *itertools.zip_longest(*(r.flatten().tolist() for r in rounds))
            )
            if row is not None
        ]

    for batch_size in (1, 3, 8):
        for ranks in (1, 2):
            assert rows(5, 1, batch_size, ranks) == [1, 2, 1, 2, 1]
            assert rows(5, 2, batch_size, ranks) == [1, 1, 2, 2, 1]
            assert rows(0, 3, batch_size, ranks) == [1, 1, 1, 2, 2, 2]
            assert rows(1, 3, batch_size, ranks) == [1]


def test_several_responses_to_each_query_of_the_data_set(labelled_run):
    """Queries of the data set in the same order, each as often as asked for, however many at a
    time."""
    once = [query for query, _ in responses(sampled(labelled_run, '--nsamples=8').stdout)]
    for size in (1, 3, 8):
        result = sampled(labelled_run, '--nsamples=20', '--per_query=3', f'--batch_size={size}')
        found = [query for query, _ in responses(result.stdout)]
        assert found == [query for query in once for _ in range(3)][:20]
        assert result.stdout.startswith('=' * 80 + '\n') and result.stderr == ''


def test_queries_are_those_of_the_test_part(copied_run, tmp_path):
    (tmp_path / 'x.jsonl').write_text('"the film was"\n')
    (tmp_path / 'x.test.jsonl').write_text('"the plot was"\n')
    changed_task(copied_run, query_dataset=f'{tmp_path}/x.jsonl')
    result = sampled(copied_run, '--nsamples=2')
    assert [query for query, _ in responses(result.stdout)] == ['the plot was'] * 2
    part = f'{tmp_path}/x.test.jsonl, the test part'
    assert result.stderr == f'Queries are from {part}: 1 of 1 texts are used\n'


def test_output_changes_no_sample(labelled_run, tmp_path):
    plain, kept = (
        sampled(labelled_run, '--nsamples=6', '--seed=4', *words).stdout
        for words in ([], [f'--output={tmp_path}/out.jsonl'])
    )
    assert plain == kept


@needs_mpi
@pytest.mark.slow
def test_two_ranks_share_the_prompts(labelled_run, tmp_path):
    """Nine samples by two ranks, two at a time each, are those of one rank."""
    words = [*prompts(), '--per_query=3', '--temperature=0', '--batch_size=2']
    one = sampled(labelled_run, *words, f'--output={tmp_path}/one.jsonl')
    two = Launch(
        tmp_path,
        f'--save_dir={labelled_run}',
        '--mpi=2',
        *words,
        f'--output={tmp_path}/two.jsonl',
        command=('sample.py', 'sample'),
    )
    assert two.wait() == 0, two.errors()
    assert two.output() == one.stdout and two.errors() == f'Saved 9 samples in {tmp_path}/two.jsonl'
    for ours, theirs in zip(
        saved(tmp_path / 'two.jsonl'), saved(tmp_path / 'one.jsonl'), strict=True
    ):
        for name in ('score', 'kl'):
            assert ours.pop(name) == pytest.approx(theirs.pop(name), abs=1e-4)
        assert ours == theirs


@pytest.mark.parametrize('size', ONE_AND_TWO)
def test_interrupted_sampling_is_quiet_and_its_output_complete(labelled_run, tmp_path, size):
    path = tmp_path / 'out.jsonl'
    launch = Launch(
        tmp_path,
        f'--save_dir={labelled_run}',
        f'--mpi={size}',
        f'--output={path}',
        command=('sample.py', 'sample'),
    )
    eventually(lambda: path.exists() and len(path.read_bytes().splitlines()) > 20)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    launch.assert_nothing_left(10)
    assert launch.errors() == ''
    rows, printed = saved(path), responses(launch.output())
    assert path.read_text().endswith('\n') and len(rows) > 20
    whole = printed[:-1]  # of the last one a part may be missing: nobody passes it on any more
    assert whole == [(row['query'], row['response']) for row in rows][: len(whole)]


# ---------------------------------------------------------------- mistakes


def mistake(run, *words):
    result = invoke(['sample', f'--save_dir={run}', '--mpi=1', *words], sample.cli)
    assert (result.exit_code, result.stdout) == (2, ''), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix('error: ')


@pytest.mark.parametrize(
    'words, told',
    [
        (
            ['--prompt', 'the film was very very good'],
            (
                "--prompt 'the film was very very good' has 6 tokens, but the queries of this run"
                ' have at most 5 (its --task.query_length): shorten it'
            ),
        ),
        (['--prompt', ''], "--prompt '' is empty: the model needs at least one token to continue"),
        (
            ['--prompt', ' \n'],
            "--prompt ' \\n' is empty: the model needs at least one token to continue",
        ),
        (
            ['--prompt', 'the xyzzy was'],
            (
                "--prompt 'the xyzzy was': encoding 'reviews' has no word 'xyzzy'; it knows those"
                ' of our film reviews only'
            ),
        ),
        (
            ['--prompt', 'film ' * 50],
            (
                f"--prompt '{'film ' * 12}...' has 50 tokens, "
                'but the queries of this run have at most 5 (its --task.query_length): shorten it'
            ),
        ),
        (
            ['--savescope', 'polcy'],
            '--savescope polcy: the checkpoint in RUN/policy has policy and ref_policy',
        ),
        (['--queries', 'RUN/nothing.jsonl'], '--queries RUN/nothing.jsonl: no such file'),
    ],
)
def test_mistakes(labelled_run, words, told):
    found = mistake(labelled_run, *(word.replace('RUN', str(labelled_run)) for word in words))
    assert found.lower().startswith(told.replace('RUN', str(labelled_run)).lower())


def test_texts_that_the_model_has_no_positions_for(copied_run):
    changed_task(copied_run, query_length=1000)
    told = '--task.query_length 1000 + --task.response_length'
    assert mistake(copied_run, '--prompt', 'the film was').startswith(told)


@pytest.mark.parametrize(
    'text, told',
    [
        ('"the film was"\n"the xyzzy"\n', ", line 2: encoding 'reviews' has no word 'xyzzy'"),
        ('"the film was"\n""', ', line 2 is empty'),
        ('"the film was"\n\n"the xyzzy"\n', ", line 3: encoding 'reviews' has no word 'xyzzy'"),
        ('{"text": "the film was"}', ', line 1 is not a JSON string'),
        ('"the film was really very good"', ', line 1 has 6 tokens'),
        ('', ' has no text'),
    ],
)
def test_mistakes_in_a_file_of_queries(labelled_run, tmp_path, text, told):
    path = tmp_path / 'queries.jsonl'
    path.write_text(text)
    assert mistake(labelled_run, f'--queries={path}').startswith(f'--queries {path}{told}')


def test_an_empty_prompt_will_do_where_the_task_puts_text_before_it(copied_run):
    changed_task(copied_run, query_prefix='the film was')
    result = sampled(copied_run, '--prompt=')
    line, query, response = result.stdout.splitlines()
    assert (line, query) == ('=' * 80, '') and len(response.split()) == 3


def test_what_exists_is_not_written_over(labelled_run, tmp_path, monkeypatch):
    """It is refused before a model is loaded."""
    monkeypatch.setattr(TrainedModel, 'build', None)
    path = tmp_path / 'out.jsonl'
    path.write_text('mine')
    assert mistake(labelled_run, f'--output={path}') == f'--output {path} exists: give another name'
    assert path.read_text() == 'mine'


def test_a_mistake_leaves_no_output(labelled_run, tmp_path):
    mistake(labelled_run, '--prompt=xyzzy', f'--output={tmp_path}/out.jsonl')
    assert not (tmp_path / 'out.jsonl').exists()


def test_a_full_disk_is_one_line(labelled_run, tmp_path):
    """Here, a limit of 512 or 1024 bytes for a file. What is there then is whole samples."""
    path = tmp_path / 'out.jsonl'
    limited = ('sh', '-c', 'ulimit -f 1; exec "$@"', 'sh')
    launch = Launch(
        tmp_path,
        f'--save_dir={labelled_run}',
        '--mpi=1',
        *prompts(),
        '--per_query=9',
        f'--output={path}',
        command=('sample.py', 'sample'),
        started_by=limited,
    )
    assert launch.wait() == 2
    rows = saved(path)
    assert 1 < len(rows) < 27 and path.read_text().endswith('\n')
    assert (
        launch.errors()
        == f'error: --output {path} cannot be written: File too large; it has {len(rows)} samples'
    )


def test_what_the_original_printed_is_an_option(labelled_run):
    result = sampled(labelled_run, *prompts(), '--console=original')
    head = result.stdout.partition('=' * 80)[0].splitlines()
    assert head[0].startswith('hparams HParams(run=') and head[1] == 'model_hparams:'
    assert re.fullmatch('  n_vocab: [0-9]+', head[-2]) and len(responses(result.stdout)) == 3


def test_texts_are_written_as_they_are(tmp_path):
    path = tmp_path / 'out.jsonl'
    file = SampleFile(str(path))
    file.write({'query': '“é”'})
    file.write({'query': 'e'})
    assert path.read_text(encoding='utf-8') == '{"query": "“é”"}\n{"query": "e"}\n'
