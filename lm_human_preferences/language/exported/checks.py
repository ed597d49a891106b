"""Checks that transformers computes the expected tokens and outputs from an exported model."""

from collections.abc import Sequence
from typing import Any

import torch

from lm_human_preferences.errors import UserError

# Exported models are checked with this text, because every encoding has tokens for its words.
QUERY, RESPONSE = 'the film was', ' good'
TOLERANCE = 1e-3  # largest allowed difference, as a fraction of the largest expected output


def tokens_of(directory: str, text: Any, folder: str = '') -> list[int]:
    """Return AutoTokenizer's token ids for a text, or for messages in its chat template."""
    from transformers import AutoTokenizer  # importing transformers takes seconds

    tokeniser = AutoTokenizer.from_pretrained(directory, subfolder=folder)
    if isinstance(text, str):
        return tokeniser(text, add_special_tokens=False)['input_ids']
    return tokeniser.apply_chat_template(text, add_generation_prompt=True)['input_ids']


def check_tokens(directory: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise UserError if `found`, transformers' token ids for a text, are not those `expected`."""
    if list(found) != list(expected):
        raise UserError(
            f'{directory}: transformers encodes a text as {list(found)!r:.80}, but the training'
            f' encoded it as {list(expected)!r:.80}: the tokeniser cannot be exported'
        )


@torch.no_grad()
def check_logits(directory: str, tokens: Sequence[int], expected: torch.Tensor) -> None:
    """Raise UserError unless the exported model has logits `expected (n_vocab,)` after `tokens`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    found = model(input_ids=torch.tensor([tokens])).logits[0, -1, : len(expected)].float()
    check_numbers(directory, found, expected)


@torch.no_grad()
def states_of(directory: str, tokens: Sequence[int], start: int) -> torch.Tensor:
    """Return the inputs of all blocks at the positions that predict the tokens from `start` on.

    Shape: (blocks, 1, length - start, n_embd).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack(states[:-1])[:, :, start - 1 : -1].float()


@torch.no_grad()
def scores_of(directory: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return the score (1,) that the exported classifier gives to token ids."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory)
    return model(input_ids=torch.tensor([tokens])).logits[0].float()


def check_numbers(directory: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise UserError unless outputs `found` of the exported model are close to `expected`."""
    difference = (found.cpu() - expected.cpu()).abs().max()
    # Unlike a comparison by `>`, `not ... <=` also refuses NaN.
    if not difference <= TOLERANCE * expected.abs().max().clamp(min=1):
        raise UserError(
            f'{directory}: the model that transformers loads is not the exported one: outputs'
            f' differ by up to {difference:.3g}'
        )
