"""Reward models as transformers' sequence classifiers with a single label, the reward."""

from typing import Any, NamedTuple, Self

import torch

from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.library import empty_model


class RewardHead(NamedTuple):
    """Reward as a linear function of a hidden state h: weight · h + constant, weight (n_embd,)."""

    weight: torch.Tensor
    constant: float

    @classmethod
    @torch.no_grad()
    def folded(cls, head: Any, gain: torch.Tensor, bias: torch.Tensor) -> Self:
        """Return a ScalarHead as a RewardHead, with the reward's `gain` and `bias` folded in."""
        scale = float(gain)
        return cls(scale * head.w.double().cpu(), scale * float(head.b) + float(bias))


@torch.no_grad()
def classifier_of(causal_lm: Any, head: RewardHead, n_vocab: int, name: str) -> Any:
    """Return a classifier of `causal_lm` and `head`; UserError if transformers lacks the class."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    family = causal_lm.config.model_type
    if family not in KNOWN:
        raise UserError(
            f'{name} cannot be exported: its reward head needs a sequence classifier, which'
            f' transformers lacks for models of the family {family}'
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
            # For 'regression', the text-classification pipeline applies no sigmoid to the score.
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
            state[key] = padded  # rows of added tokens stay zero
    target.load_state_dict(state)
    model.score.weight.copy_(head.weight[None].float())
    model.config.reward_constant = head.constant  # users add this constant to the model's scores
    return model
