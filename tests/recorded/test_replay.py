"""Whole runs replayed on their recorded queries and responses: training, console, files."""

import re

import numpy as np
import pytest
from compare import SUM_ATOL, assert_close, assert_equal, assert_stats, tokens
from console import assert_lines
from events import CLOCK, assert_events, events_of
from golden_data import found, golden, load_json, load_npz, require, require_bpe, under
from ranks import rank_prefix, ranks_here, same_for_all
from replay import (
    Replay,
    check_batches,
    check_normalization,
    episodes_of_normalizations,
    local_paths,
    numbered,
)
from sample_files import tf_variables
from trainers import assert_checkpoint, assert_parameters, files_in, shapes_in

from lm_human_preferences import train_policy
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

RUNS = [path.removesuffix('_inputs/trace.npz') for path in found('*_inputs/trace.npz')]
LATER_RTOL = 1e-3  # errors add up over steps


class Run:
    def __init__(self, name, save_dir, monkeypatch, capsys):
        self.name, self.save_dir = name, same_for_all(save_dir)
        self.info = load_json(f'{name}_inputs', 'info.json')
        self.arrays = load_npz(f'{name}_inputs', 'trace.npz')
        self.size = self.info['ranks']
        hparams = train_policy.HParams()
        hparams.override_from_dict(self.info['hparams_passed'])
        self.hparams = local_paths(hparams, self.save_dir)
        self.replay = Replay(monkeypatch, self.episodes(), self.initial_variables())
        self.replay.run(train_policy.train, self.hparams)
        self.stdout = capsys.readouterr().out

    def of_rank(self, rank, kind):
        return {
            **under(self.arrays, f'{kind}/'),
            **under(self.arrays, f'{rank_prefix(rank, self.size)}{kind}/'),
        }

    def episodes(self):
        found = []
        for rank in range(self.size):
            found += episodes_of_normalizations(self.of_rank(rank, 'reward'), 1)
            for step in numbered(self.of_rank(rank, 'policy'), 'step'):
                found[-1].append((step['queries'], step['respond/responses']))
        return found

    def initial_variables(self):
        """The reward model's at the start of its training, the policies' at the start of theirs."""
        reward, policy = (
            under(self.of_rank(0, kind), 'initial_variables/') for kind in ('reward', 'policy')
        )
        return {
            **policy,
            **{name: value for name, value in reward.items() if name.startswith('reward_model/')},
        }


@pytest.fixture(params=RUNS)
def run(request, tmp_path, monkeypatch, capsys):
    hparams = load_json(f'{request.param}_inputs', 'info.json')['hparams_passed']
    if hparams['task.query_dataset'] != 'test':
        require_bpe()
    return Run(request.param, tmp_path / 'run', monkeypatch, capsys)


def test_run(run):
    check_reward_training(run)
    for rank in ranks_here(run.size):
        check_steps(run, rank)
    if 0 not in ranks_here(run.size):  # which writes the files
        return
    check_reference(run)
    check_events(run)
    check_files(run)
    check_saved_values(run)
    if run.size == 1:
        check_console(run)


def check_reward_training(run):
    recorded = [run.of_rank(rank, 'reward') for rank in range(run.size)]
    for arrays in recorded:
        batches = numbered(arrays, 'batch')
        arrays['indices'] = np.stack([b['indices'] for b in batches])
        arrays['lr'] = [b['lr'] for b in batches]
    trainers = run.replay.reward_trainers
    check_batches(trainers, recorded, under(recorded[0], 'recorded/'), recorded[0]['permutation0'])
    check_normalization(trainers, recorded)
    for trainer in trainers.values():
        final = under(recorded[0], 'final_variables/')
        if final:
            ours = tf_variables(trainer.reward_model.parameters_by_name(), 'reward_model')
            assert_parameters(ours, final)


def check_steps(run, rank):
    trainer, recorded = run.replay.ppo_trainers[rank], numbered(run.of_rank(rank, 'policy'), 'step')
    assert len(trainer.steps) == len(recorded)
    for step, (ours, arrays) in enumerate(zip(trainer.steps, recorded, strict=True)):
        check_step(ours, arrays, run.hparams, rtol=LATER_RTOL if step else 1e-4)


def check_step(ours, arrays, hparams, rtol):
    computed = 'respond/logprobs respond/values ref/logprobs scores rewards non_score_reward'
    for name in computed.split():
        assert_close(ours[name], arrays[name], rtol=rtol, atol=2e-5, name=name)
    for name in ('postprocessed_responses', 'global_step'):
        assert_equal(ours[name], arrays[name], name=name)
    for name in ('kl_coef', 'kl_coef_after'):
        assert_close(ours[name], arrays[name], rtol=1e-6, name=name)
    elements = len(arrays['queries']) // hparams.ppo.nminibatches * hparams.task.response_length
    recorded = under(arrays, 'train_stats/')
    assert_stats(ours['train_stats'], recorded, rtol=rtol, atol=1e-6, elements=elements)
    stats = {name: value for name, value in ours['step_stats'].items() if name not in CLOCK}
    assert_stats(stats, under(arrays, 'step_stats/'), rtol=rtol, atol=SUM_ATOL, elements=elements)
    assert_parameters(ours['policy_params_after'], under(arrays, 'policy_params_after/'))


def check_reference(run):
    trainer = run.replay.ppo_trainers[0]
    step = numbered(run.of_rank(0, 'policy'), 'step')[-1]
    queries, responses = tokens(step['queries']), tokens(step['respond/responses'])
    analyzed = trainer.ref_policy.analyze_responses(queries, responses)
    for name in ('logprobs', 'values'):
        assert_close(analyzed[name], step[f'ref/{name}'], rtol=1e-5, atol=2e-5, name=name)
    # Over 50257 tokens the original's entropies are 1e-4 off what float64 gives, ours 2e-5.
    large = trainer.ref_policy.model.sizes.n_vocab > 1000
    atol = 2e-4 if large else 2e-5
    assert_close(analyzed['entropies'], step['ref/entropies'], rtol=1e-5, atol=atol)


def check_events(run):
    """Every tag at every step; the original lost the last ones (defect 23)."""
    recorded = run.of_rank(0, 'policy')
    expected, events = under(recorded, 'recorded/'), events_of(run.save_dir / 'tb' / 'ppo')
    assert set(events) == set(expected)
    for name, values in expected.items():
        steps, ours = zip(*events[name], strict=True)
        assert_equal(steps, recorded['recorded_step'])
        if name not in CLOCK:
            assert_close(ours, values, rtol=LATER_RTOL, atol=SUM_ATOL, name=name)
    if run.name != 'policy_2ranks':  # of which no files were kept
        written = load_json(f'{run.name}_inputs', 'tb_events.json')
        assert_events(run.save_dir / 'tb', written, rtol=LATER_RTOL)


def check_files(run):
    """The recorded files but for TensorFlow's graphs; their variables as recorded."""
    written = files_in(run.save_dir)
    for name, size in run.info['files']:
        if name.endswith('.meta'):
            continue
        if 'tfevents' in name:
            assert any(other.startswith(name.rpartition('/')[0]) for other in written), name
            continue
        assert name in written
        if '.data-' in name or name.endswith(('checkpoint', 'encoding')):
            assert written[name].stat().st_size == size, name
    for kind in ('policy', 'reward'):
        folder = {'policy': 'policy', 'reward': 'reward_model'}[kind]
        newest = Bundle(checkpoints.latest(str(run.save_dir / folder / 'checkpoints')))
        assert run.info[f'{kind}_checkpoint'] == shapes_in(newest)


def check_saved_values(run):
    if not golden(run.name).exists():
        return
    for index in found(f'{run.name}/*/checkpoints/*.index'):
        name = index.removeprefix(f'{run.name}/').removesuffix('.index')
        recorded = Bundle(str(golden(run.name, name)))
        without = ['start_time', 'last_time']
        is_random = run.hparams.task.policy.initial_model == 'test'
        if name.startswith('reward_model/') and is_random:  # it is not in the trace
            without += [each for each in recorded if each.startswith('ref_policy/')]
        ours = Bundle(str(run.save_dir / name))
        assert_checkpoint(ours, recorded, rtol=LATER_RTOL, without=without)
    for folder in ('policy', 'reward_model'):
        for name in ('hparams.json', 'encoding', 'checkpoints/checkpoint'):
            written = (run.save_dir / folder / name).read_text()
            assert written == golden(run.name, folder, name).read_text()


def check_console(run):
    recorded = require(f'{run.name}_inputs', 'stdout.txt').read_text(encoding='utf-8')
    settings = {'rtol': LATER_RTOL, 'ours_only': ['WARNING: '], 'recorded_total': False}
    assert_lines(run.stdout, recorded, **settings)
    check_totals(run)
    times = re.findall(r'^\[ppo_step \d+\] step_time=(\S+)s, ', run.stdout, flags=re.M)
    assert times and all(0 <= float(seconds) < 60 for seconds in times)


def check_totals(run):
    """Defect 24: a sample's total has the KL coefficient in force, not the first one."""
    kl_coefs, checked = [step['kl_coef'] for step in run.replay.ppo_trainers[0].steps], 0
    blocks = re.split(r'^\[ppo_step \d+\].*$', run.stdout, flags=re.M)
    for kl_coef, block in zip(kl_coefs, blocks, strict=False):
        sample = r'score = (\S+)\n  kl = (\S+)\n  total = (\S+)$'
        for values in re.findall(sample, block, flags=re.M):
            score, kl, total = map(float, values)
            rounding = 0.005 + 0.005 + 0.005 * kl_coef + 1e-6
            assert abs(total - (score - kl_coef * kl)) < rounding
            checked += 1
    assert checked
