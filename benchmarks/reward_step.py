#!/usr/bin/env python3
"""One training step of a reward model on best-of-4 labels beside plain PyTorch on the same work.

    pipenv run python benchmarks/reward_step.py [--model gpt2] [--size 124M] [--batch 8]
        [--repeats 3] [--threads 2] [--library default] [--no-bf16]

Both are measured in the same run. The plain version passes each query four times through
transformers' model, once with each response. `GFLOP` is the least work that a step needs in any
implementation; `of rate` is the achieved share of this machine's rate of matrix products, measured
in the same process.
"""

from typing import Any

import measuring
import numpy as np
import torch
import workload
from workload import PADDING, RESPONSE_LENGTH, VOCABULARY

from lm_human_preferences import train_reward
from lm_human_preferences.distributed import comm
from lm_human_preferences.plan.phases import reward_phase
from lm_human_preferences.rewards import RewardModel

NUM_RESPONSES = 4
WARM_UP = 3  # steps: until then the process takes more memory, which some machines are slow to give
NOT_USED: Any = None  # steps on labels that are there sample nothing


def labels(batch):
    """Labels of as many queries: random tokens and choices."""
    samples = torch.randint(VOCABULARY, (NUM_RESPONSES, batch, RESPONSE_LENGTH))
    return {
        'query': workload.queries(batch),
        'best': torch.randint(NUM_RESPONSES, (batch,)),
        **{f'sample{i}': sample for i, sample in enumerate(samples)},
    }


def hparams_of(batch):
    """Return the settings of a step on so many best-of-4 labels; nothing printed, nothing saved."""
    hparams = train_reward.HParams()
    hparams.override_from_dict(
        {
            'labels.type': f'best_of_{NUM_RESPONSES}',
            'labels.source': 'test',
            'batch_size': batch,
            'run.log_interval': 10**9,
        }
    )
    return hparams


def trainer_of(hparams, reward_model, batch, policy=NOT_USED):
    """Return the trainer that `./launch.py train_reward` uses, of `reward_model` on `batch`."""
    phase = reward_phase(hparams)
    trainer = train_reward.RewardModelTrainer(
        reward_model=reward_model,
        policy=policy,
        query_sampler=NOT_USED,
        labels=batch,
        phase=phase,
        logger=train_reward.logger_of(phase, comm.init_comm()),
        comm=comm.init_comm(),
    )
    trainer.steps_done = 1  # step 0 would print
    return trainer


def ours(args, batch):
    """The step of our trainer."""
    reward_model = RewardModel(workload.random_model(args.size, args.model))
    trainer = trainer_of(hparams_of(args.batch), reward_model, batch)
    return lambda: trainer.train_batch(np.arange(args.batch), lr=5e-5)


def plain(args, batch):
    """The same step in the plainest PyTorch."""
    network = workload.plain_model(args.size, args.model)
    head = torch.nn.Linear(network.config.hidden_size, 1, device=network.device)
    batch = {field: values.to(network.device) for field, values in batch.items()}
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=5e-5, eps=1e-5)
    queries, mask = workload.padded_left(batch['query'])
    mask = torch.nn.functional.pad(mask, (0, RESPONSE_LENGTH), value=True)

    def reward(sample):
        output = network(
            torch.cat([queries, sample], dim=1),
            attention_mask=mask.long(),
            position_ids=workload.positions(mask),
            output_hidden_states=True,
        )
        return head(output.hidden_states[-1][:, -1]).squeeze(-1)

    def step():
        rewards = torch.stack([reward(batch[f'sample{i}']) for i in range(NUM_RESPONSES)], dim=1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(rewards, batch['best']).backward()
        optimizer.step()

    return step


def flops(size, queries, model):
    """The FLOPs of one step.

    It makes a forward and a backward pass (twice the work) of each query, once, and its responses.
    """
    total = 0
    for real in (queries != PADDING).sum(1).tolist():
        of_query = workload.attention_flops(size, real)
        of_both = workload.attention_flops(size, real + RESPONSE_LENGTH)
        attention = of_query + NUM_RESPONSES * (of_both - of_query)
        total += 3 * (
            attention
            + workload.linear_flops(
                size,
                tokens=real + NUM_RESPONSES * RESPONSE_LENGTH,
                read=NUM_RESPONSES,
                model=model,
            )
        )
    return total


def measure(args):
    """One variant's step."""
    batch = labels(args.batch)
    step = (plain if args.variant == 'plain' else ours)(args, batch)
    return {
        **measuring.repeat(step, measuring.Clock(), args.repeats, warm_up=WARM_UP),
        'flops': flops(args.size, batch['query'], args.model),
    }


if __name__ == '__main__':
    measuring.main(measuring.arguments(__doc__, batch=8), measure, unit='step')
