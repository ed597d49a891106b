#!/usr/bin/env python3
"""Sampling, and a PPO update, where responses end early, beside responses of the full length.

    pipenv run python benchmarks/lengths.py [--model gpt2] [--size 124M] [--batch 16] [--limit 200]
        [--work sampling] [--repeats 3] [--threads 2] [--library default] [--variant fp32]

With --task.stop, lengths are drawn between 10 and 40 % of the limit. `queries` is the time of the
same work with a limit of one token. `per token` is the time of a token of a response, without that
of its query, beside that of a token of the full responses: 1 where the work is in proportion.
"""

import argparse
import statistics

import measuring
import torch
import workload
from ppo_update import Ours, hparams_of

from lm_human_preferences.distributed import comm
from lm_human_preferences.utils.core import default_device


def drawn_ends(limit):
    """Return an end of responses at lengths drawn evenly between 10 and 40 % of `limit`."""
    first, last = limit // 10, limit * 4 // 10

    def is_end(sampled, position):
        length = position + 1
        chance = 0 if length < first else 1 / max(1, last - length + 1)
        return torch.rand(len(sampled), device=sampled.device) < chance

    return is_end


def seconds_of(work, repeats):
    """(median seconds, real tokens of the last call) of `work`, after one call that warms up."""
    times = []
    for _ in range(repeats + 1):
        started = measuring.now()
        tokens = work()
        times.append(measuring.now() - started)
    return statistics.median(times[1:]), tokens


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measuring.add_model(parser)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--limit', type=int, default=200)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--variant', default='fp32', choices=['fp32', 'bf16'])
    parser.add_argument('--work', choices=['sampling', 'update'], help='only this')
    measuring.add_library(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    measuring.set_up(args.variant, args.size, args.library)
    hparams = hparams_of(args.batch)
    queries = workload.queries(args.batch).to(default_device())
    ours = Ours(
        args.size,
        hparams,
        queries,
        comm.init_comm(),
        lambda size: workload.random_model(size, args.model),
    )
    policy = ours.trainer.policy

    def sample():
        responses = policy.respond(queries, hparams.task.response_length)['responses']
        return int((responses != policy.padding_token).sum())

    def update():
        ours.update()
        return int((ours.trainer.rollout.responses != policy.padding_token).sum())

    def seconds_to(work, limit, is_end=None):
        hparams.task.response_length, policy.is_end = limit, is_end
        return seconds_of(work, args.repeats)

    print(
        f'{measuring.machine(args.size, args.library)}, {args.model} {args.size}, {args.variant},'
        f' {args.threads} threads, batch {args.batch}, limit {args.limit}'
    )
    columns = ('queries', 'full', 'ended', 'tokens', 'time')
    print(f'{"":8}', *(f'{column:>8}' for column in columns), f'{"per token":>10}')
    works = {'sampling': sample, 'update': update}
    for name in [args.work] if args.work else works:
        work = works[name]
        of_queries, _ = seconds_to(work, 1)
        full, all_tokens = seconds_to(work, args.limit)
        ended, tokens = seconds_to(work, args.limit, drawn_ends(args.limit))
        share = tokens / all_tokens
        per_token = (ended - of_queries) / (full - of_queries) / share
        figures = (of_queries, full, ended, share, ended / full)
        print(f'{name:8}', *(f'{figure:8.2f}' for figure in figures), f'{per_token:10.2f}')


if __name__ == '__main__':
    main()
