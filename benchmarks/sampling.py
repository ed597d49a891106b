#!/usr/bin/env python3
"""Tokens per second of `./sample.py sample` beside `generate` of transformers.

    pipenv run python benchmarks/sampling.py [--model gpt2] [--size 124M] [--batches 16,1]
        [--repeats 5] [--threads 2] [--library default] [--no-bf16]

Both continue 64 tokens by 24 at temperature 0.7, in the same run; weights are random. Ours also
gives log-probabilities and values. bf16 is what the rollouts of `--run.precision bf16` take;
sample.py itself computes in fp32 by default.
"""

import argparse
import statistics

import measuring
import torch
import workload
from workload import QUERY_LENGTH, RESPONSE_LENGTH, VOCABULARY

from lm_human_preferences.policy import Policy

TEMPERATURE = 0.7


def sampled(policy, contexts):
    """Our responses."""
    assert policy.respond(contexts, length=RESPONSE_LENGTH)['responses'].shape == (
        len(contexts),
        RESPONSE_LENGTH,
    )


def generated(network, contexts):
    """Those of transformers."""
    tokens = network.generate(
        contexts,
        attention_mask=torch.ones_like(contexts),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=RESPONSE_LENGTH,
        min_new_tokens=RESPONSE_LENGTH,
        pad_token_id=0,
    )
    assert tokens.shape == (len(contexts), QUERY_LENGTH + RESPONSE_LENGTH)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measuring.add_model(parser)
    parser.add_argument('--batches', default='16,1')
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--threads', type=int, default=2)
    measuring.add_library(parser)
    measuring.add_no_bf16(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    variants = measuring.chosen(measuring.VARIANTS, args)
    # Each has its own, since a policy keeps copies of its weights for one precision.
    policies = {
        variant: Policy(
            workload.random_model(args.size, args.model),
            temperature=TEMPERATURE,
            only_samples=True,
        )
        for variant in variants
        if variant != 'plain'
    }
    network = workload.plain_model(args.size, args.model).eval()
    print(
        f'{measuring.machine(args.size, args.library)}, torch {torch.__version__}, {args.model}'
        f' {args.size}, {args.threads} threads, tokens per second'
    )
    heads = (f'{name:>7} {"faster":>7}' for name in policies)
    print(f'{"batch":>5} {"generate":>9}', *heads)
    for batch in map(int, args.batches.split(',')):
        contexts = torch.randint(VOCABULARY, (batch, QUERY_LENGTH)).to(network.device)
        seconds = {variant: [] for variant in variants}
        for _ in range(args.repeats + 1):
            for variant, times in seconds.items():
                measuring.set_up(variant, args.size, args.library)
                started = measuring.now()
                if variant == 'plain':
                    generated(network, contexts)
                else:
                    sampled(policies[variant], contexts)
                times.append(measuring.now() - started)
        plain, *ours = (
            batch * RESPONSE_LENGTH / statistics.median(times[1:]) for times in seconds.values()
        )
        columns = (f'{rate:7.1f} {rate / plain:7.2f}' for rate in ours)
        print(f'{batch:5} {plain:9.1f}', *columns, flush=True)


if __name__ == '__main__':
    main()
