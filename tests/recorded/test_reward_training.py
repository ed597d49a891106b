"""train_reward.train on recorded labels against reward_training/ and reward_training_2ranks/."""

import numpy as np
import pytest
from compare import assert_close, assert_equal
from console import assert_lines
from events import assert_events, events_of
from golden_data import golden, json_if_there, load_json, load_npz, require, under
from ranks import rank_prefix, ranks_here, same_for_all
from replay import (
    Replay,
    check_batches,
    check_normalization,
    episodes_of_normalizations,
    local_paths,
)
from sample_files import tf_variables
from trainers import assert_checkpoint, assert_parameters, files_in, hparams_of, shapes_in

from lm_human_preferences import storage, train_reward
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

FOLDERS = ('reward_training', 'reward_training_2ranks')
RECORDED = {folder: json_if_there(folder, 'runs.json', default={'runs': ()}) for folder in FOLDERS}
RUNS = {
    (folder, run['id']): run for folder, recorded in RECORDED.items() for run in recorded['runs']
}
SAVED = [(folder, name) for folder, name in RUNS if golden(folder, f'saved_{name}').exists()]
TAGS = 'train_reward/minibatch/'


class Trained:
    def __init__(self, folder, run, save_dir, monkeypatch, capsys):
        self.folder, self.run, self.save_dir = folder, run, same_for_all(save_dir)
        self.size = RECORDED[folder]['ranks']
        self.arrays = load_npz(folder, f'{run["id"]}.npz')
        hparams = local_paths(hparams_of(train_reward.HParams, run['hparams']), self.save_dir)
        self.replay = Replay(monkeypatch, episodes_of_normalizations(self.arrays, self.size))
        self.replay.run(train_reward.train, hparams)
        self.stdout = capsys.readouterr().out

    def recorded(self):
        return [under(self.arrays, rank_prefix(rank, self.size)) for rank in range(self.size)]

    def saved(self):
        return Bundle(checkpoints.latest(str(self.save_dir / 'reward_model' / 'checkpoints')))


@pytest.fixture(params=RUNS, ids='/'.join)
def trained(request, tmp_path, monkeypatch, capsys):
    return Trained(request.param[0], RUNS[request.param], tmp_path / 'run', monkeypatch, capsys)


def test_reward_training(trained):
    """One recorded run after the other, from the order of labels to the files."""
    check_batches(
        trained.replay.reward_trainers,
        trained.recorded(),
        under(trained.arrays, 'stats/'),
        trained.arrays['permutation'],
    )
    check_normalization(trained.replay.reward_trainers, trained.recorded())
    for trainer in trained.replay.reward_trainers.values():
        assert_equal(np.arange(len(trainer.traced)), trained.arrays['stats_step'])
        ours = tf_variables(trainer.reward_model.parameters_by_name(), 'reward_model')
        assert_parameters(ours, under(trained.arrays, 'final/'))
    if 0 not in ranks_here(trained.size):  # which writes the files
        return
    check_saved_parameters(trained)
    check_files(trained)
    check_events(trained)
    if trained.size == 1:
        recorded = require(trained.folder, f'{trained.run["id"]}.stdout.txt')
        assert_lines(trained.stdout, recorded.read_text(encoding='utf-8'))


def check_saved_parameters(trained):
    bundle = trained.saved()
    assert_parameters({name: bundle[name] for name in bundle}, under(trained.arrays, 'final/'))
    assert_close(bundle['reward_model/reward_norm/gain'], trained.run['gain'])
    assert_close(bundle['reward_model/reward_norm/bias'], trained.run['bias'], atol=5e-6)


def check_files(trained):
    written = files_in(trained.save_dir)
    for name in trained.run['files']:
        assert name in written or name.endswith('.meta') or 'tfevents' in name, name
    folders = {name.rpartition('/')[0] for name in written if 'tfevents' in name}
    assert folders == {f'tb/{folder}' for folder in trained.run['tb_dirs']}
    if trained.run['checkpoint']:  # recorded for one type of labels only
        assert shapes_in(trained.saved()) == trained.run['checkpoint']


def check_events(trained):
    """All statistics of all steps; the original lost the last ones (defect 23)."""
    events = events_of(trained.save_dir / 'tb' / 'reward_model')
    assert sorted(events) == sorted(trained.run['tb_tags'])
    for name, values in under(trained.arrays, 'stats/').items():
        assert [step for step, _ in events[TAGS + name]] == list(trained.arrays['stats_step'])
        assert_close([value for _, value in events[TAGS + name]], values, atol=2e-7, name=name)
    assert sum(map(len, events.values())) == trained.run['tb_events_written']


@pytest.mark.parametrize('trained', SAVED, ids='/'.join, indirect=True)
def test_saved_directory(trained):
    """Ours equals a save directory of the original: JSON, Adam's moments, everything."""
    saved = require(trained.folder, f'saved_{trained.run["id"]}')
    for name in ('hparams.json', 'encoding', 'checkpoints/checkpoint'):
        written = (trained.save_dir / 'reward_model' / name).read_text()
        assert written == (saved / 'reward_model' / name).read_text()
    hparams = load_json(trained.folder, saved.name, 'train_reward_hparams.json')
    ours = hparams_of(train_reward.HParams, {})
    written = storage.read_json(str(trained.save_dir / 'train_reward_hparams.json'))
    ours.override_from_nested_dict(written)
    assert ours == local_paths(hparams_of(train_reward.HParams, hparams), trained.save_dir)
    recorded = Bundle(str(saved / 'reward_model' / 'checkpoints' / 'model.ckpt'))
    assert_checkpoint(trained.saved(), recorded)
    written = load_json(trained.folder, f'{saved.name}.tb_events.json')
    assert_events(trained.save_dir / 'tb', written, rtol=1e-4)
