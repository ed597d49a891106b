"""TRL's PPO on the workload of ppo_update.py, if TRL is installed; the project does without it."""

import argparse
import importlib
import importlib.util
import os
import tempfile
from typing import Any

import torch
import workload
from workload import RESPONSE_LENGTH, VOCABULARY

END_OF_TEXT = VOCABULARY - 1


def is_installed():
    return importlib.util.find_spec('trl') is not None


def scorer(size):
    """GPT-2 of random weights with a scalar head, for values or rewards."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    n_embd, n_head, n_layer = workload.SIZES[size]
    config = GPT2Config(
        n_embd=n_embd,
        n_head=n_head,
        n_layer=n_layer,
        pad_token_id=END_OF_TEXT,
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
    )
    config.num_labels = 1
    return GPT2ForSequenceClassification(config)


class Trl:
    """TRL's trainer, with four networks: it requires a separate value network.

    In float32, without the gradient checkpointing and the bfloat16 that are its defaults.
    """

    def __init__(self, size, hparams, queries, temperature):
        os.environ['TRL_EXPERIMENTAL_SILENCE'] = '1'
        trl: Any = importlib.import_module('trl.experimental.ppo')
        tokens, mask = workload.padded_left(queries.masked_fill(queries == END_OF_TEXT, 0))
        dataset = list(tokens.masked_fill(~mask, END_OF_TEXT))
        self.folder = tempfile.TemporaryDirectory()
        self.trainer = trl.PPOTrainer(
            trl.PPOConfig(
                output_dir=self.folder.name,
                per_device_train_batch_size=len(queries),
                gradient_accumulation_steps=1,
                total_episodes=len(queries),
                num_mini_batches=1,
                num_ppo_epochs=hparams.ppo.noptepochs,
                local_rollout_forward_batch_size=len(queries),
                response_length=RESPONSE_LENGTH,
                temperature=temperature,
                whiten_rewards=True,
                kl_coef=hparams.rewards.kl_coef,
                learning_rate=hparams.ppo.lr,
                num_sample_generations=0,
                save_strategy='no',
                report_to='none',
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
            ),
            argparse.Namespace(pad_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT),
            model=workload.plain_model(size),
            ref_model=workload.plain_model(size),
            reward_model=scorer(size),
            value_model=scorer(size),
            train_dataset=dataset,
            eval_dataset=dataset,
            data_collator=lambda rows: {'input_ids': torch.stack(rows)},
        )

    def time_phases(self, clock):
        """Nothing to time: TRL's training is one function."""

    def update(self):
        """One update, because `total_episodes` is the batch size."""
        self.trainer.train()
