"""Reward models as sequence classifiers of transformers, with one label: the reward."""

from typing import Any, NamedTuple, Self

import torch
from torch import nn

from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.library import empty_model


class RewardHead(NamedTuple):
    """Linear reward head, weight . h + constant; the gain is included in weight (n_embd,)."""

    weight: torch.Tensor
    constant: float

    @classmethod
    @torch.no_grad()
    def folded(cls, head: Any, gain: torch.Tensor, bias: torch.Tensor) -> Self:
        """Return a ScalarHead as a RewardHead, with the reward's `gain` and `bias` folded in."""
        weight, own_bias, gain, bias = (
            each.double().cpu() for each in (head.w, head.b, gain, bias)
        )
        return cls(gain * weight, float(gain * own_bias + bias))


@torch.no_grad()
def classifier_of(causal_lm: Any, head: RewardHead, n_vocab: int, name: str) -> Any:
    """Return a classifier of `causal_lm`'s body and `head`; UserError if transformers has none."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    family = causal_lm.config.model_type
    if family not in KNOWN:
        raise UserError(
            f'{name} cannot be exported: transformers has no sequence classifier for models of the'
            f' family {family}, and only that has a place for a score'
        )
    settings = causal_lm.config.to_dict()
    for key in ('architectures', '_name_or_path', 'dtype', 'torch_dtype'):
        settings.pop(key, None)
    rows = max(settings['vocab_size'], n_vocab + 1)
    config = AutoConfig.for_model(
        **{
            **settings,
            'vocab_size': rows,
            'pad_token_id': n_vocab,
            'id2label': {0: 'reward'},
            'label2id': {'reward': 0},
            # So that the text-classification pipeline applies no sigmoid to the score.
            'problem_type': 'regression',
        }
    )
    with torch.random.fork_rng(devices=[]):
        model = empty_model(config, 'AutoModelForSequenceClassification')
    model.eval()
    source, target = causal_lm.base_model, model.base_model
    embedding = source.get_input_embeddings().weight
    state = source.state_dict()
    for key, value in state.items():
        if value.data_ptr() == embedding.data_ptr() and value.shape == embedding.shape:
            padded = torch.zeros_like(target.get_input_embeddings().weight)
            padded[: len(value)] = value
            state[key] = padded  # the rows that were added are zero
    target.load_state_dict(state)
    # Saved in config.json: a constant that readers must add to the classifier's score.
    model.config.reward_constant = _set_head(model, head, n_vocab)
    return model


def _set_head(model: Any, head: RewardHead, n_vocab: int) -> float:
    """Set the head's weight w; fold its constant c into the last norm's bias b: b + c w / |w|^2.

    Return the constant still to be added to scores: 0, or c if the last norm has no bias.
    """
    model.score.weight.copy_(head.weight[None].float())
    norm = _last_norm(model, n_vocab)
    square = head.weight.square().sum()
    if norm is None or square == 0:
        return head.constant
    norm.bias.copy_((norm.bias.double() + head.constant * head.weight / square).float())
    return 0.0


def _last_norm(model: Any, n_vocab: int) -> nn.LayerNorm | None:
    """Return the LayerNorm with a bias whose outputs the head reads; None if there is none."""
    outputs: list[tuple[Any, Any]] = []
    hooks = [
        module.register_forward_hook(lambda norm, _, output: outputs.append((norm, output)))
        for module in model.base_model.modules()
        if isinstance(module, nn.LayerNorm) and module.bias is not None
    ]
    tokens = torch.arange(2).reshape(1, 2) % n_vocab
    try:
        last = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    if outputs and outputs[-1][1].shape == last.shape and torch.equal(outputs[-1][1], last):
        return outputs[-1][0]
    return None
