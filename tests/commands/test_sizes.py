"""GPT-2 of the smallest and the largest released size, at a small width: loaded, trained by both
trainings, sampled from."""

import math

import pytest
import torch
from command_line import invoke
from console import printed, responses
from sample_files import tf_variables

import sample
from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.language import model

BLOCKS_AND_HEADS = {'124M': (12, 12), '1558M': (48, 25)}
STEP = {
    'train_reward': (
        '--labels.num_train 8 --batch_size 8 --rollout_batch_size 8 --normalize_samples 8'
    ),
    'train_policy': '--ppo.total_episodes 8 --ppo.batch_size 8 --rewards.train_new_model off',
}


@pytest.fixture(params=BLOCKS_AND_HEADS)
def directory(request, tmp_path):
    """A model as the releases are: TensorFlow's checkpoint and hparams.json."""
    torch.manual_seed(0)
    n_layer, n_head = BLOCKS_AND_HEADS[request.param]
    hparams = model.HParams(n_vocab=27, n_ctx=16, n_embd=4 * n_head, n_head=n_head, n_layer=n_layer)
    network = model.Model(hparams).initialize()
    folder = str(tmp_path / request.param)
    storage.write_json(f'{folder}/hparams.json', hparams.to_nested_dict())
    storage.write_json(f'{folder}/encoding', 'test')
    checkpoints.save(folder, 'model.ckpt', tf_variables(network.named_parameters()))
    return folder


def test_a_size_trains_and_answers(directory, tmp_path):
    for command, words in STEP.items():
        trained = (
            f' --rewards.trained_model {tmp_path}/train_reward' if command == 'train_policy' else ''
        )
        result = invoke(
            f'{command} test {command} --mpi 1 --save_dir {tmp_path} --run.log_interval 1'
            f' {words}{trained} --run.console original --task.policy.initial_model {directory}'
        )
        assert result.exit_code == 0, result.output
        (loss,) = printed('loss' if command == 'train_reward' else 'ppo/loss/total', result.stdout)
        assert math.isfinite(loss)
    result = invoke(f'sample --save_dir {tmp_path}/train_policy --nsamples 4 --mpi 1', sample.cli)
    assert result.exit_code == 0 and len(responses(result.stdout)) == 4, result.output
