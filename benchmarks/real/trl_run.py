"""trl_run.py METHOD MODEL QUERIES: GRPO or RLOO of TRL on the real model of docs/real-run.md.

TRL and what it needs (accelerate, datasets) are not among the packages of this project. Prints a
JSON line for each update: seconds, episodes, and the mean reward of their responses.
"""

import argparse
import importlib
import json
import os
import pathlib
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import vader_reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from lm_human_preferences.datasets import jsonl


class Printer(TrainerCallback):
    """Prints the mean reward of each update."""

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes  # of an update
        self.started = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and 'reward' in logs:
            print(
                json.dumps(
                    {
                        'seconds': round(time.time() - self.started, 1),
                        'episodes': state.global_step * self.episodes,
                        'reward': round(logs['reward'], 3),
                        'length': round(logs['completions/mean_length'], 1),
                    }
                ),
                flush=True,
            )


def reward_of(end: int) -> Callable[..., list[float]]:
    """Return the reward of TRL's messages: -1 without the token `end`, as in the experiment."""

    def vader(completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        scores = vader_reward.score([], [completion[0]['content'] for completion in completions])
        return [score if end in tokens else -1.0 for score, tokens in zip(scores, completion_ids)]

    return vader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('method', choices=['GRPO', 'RLOO'])
    parser.add_argument('model')
    parser.add_argument('queries')
    parser.add_argument('--episodes', type=int, default=512)
    parser.add_argument('--batch', type=int, default=64)
    parser.add_argument('--samples', type=int, default=8, help='to each query')
    parser.add_argument('--length', type=int, default=64)
    parser.add_argument('--lr', type=float, default=2e-5)
    parser.add_argument('--beta', type=float, default=0.1, help='of the KL penalty')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--output', help='directory for the trained model')
    args = parser.parse_args()

    trl = importlib.import_module('trl')
    tokeniser = AutoTokenizer.from_pretrained(args.model)
    texts = [text for text in jsonl.read_jsonl(args.queries) if not jsonl.is_test_text(text)]
    random.Random(args.seed).shuffle(texts)
    datasets = importlib.import_module('datasets')
    table = importlib.import_module('pyarrow').table
    prompts = [[{'role': 'user', 'content': text}] for text in texts]
    # A name of its own: to make one, all of it is pickled, which not every version can.
    dataset = datasets.Dataset(table({'prompt': prompts}), fingerprint=f'queries-{args.seed}')
    with tempfile.TemporaryDirectory() as folder:
        settings = getattr(trl, f'{args.method}Config')(
            output_dir=folder,
            per_device_train_batch_size=min(args.batch, 32),
            gradient_accumulation_steps=max(args.batch // 32, 1),
            num_generations=args.samples,
            max_completion_length=args.length,
            max_steps=args.episodes // args.batch,
            learning_rate=args.lr,
            beta=args.beta,
            temperature=0.7,
            logging_steps=1,
            save_strategy='no',
            report_to='none',
            disable_tqdm=True,
            use_cpu=True,
            bf16=True,
            gradient_checkpointing=False,
            seed=args.seed,
        )
        trainer = getattr(trl, f'{args.method}Trainer')(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype='float32'),
            reward_funcs=reward_of(tokeniser.eos_token_id),
            args=settings,
            train_dataset=dataset,
            processing_class=tokeniser,
            callbacks=[Printer(args.batch)],
        )
        trainer.train()
    if args.output:
        trainer.model.save_pretrained(args.output)
        tokeniser.save_pretrained(args.output)
        print('saved', pathlib.Path(args.output))


if __name__ == '__main__':
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
    main()
