"""A language model with a value head that answers queries (the original's policy.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lm_human_preferences.language.network import Cache
from lm_human_preferences.language.sample import sample_sequence
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import default_device


class Policy:
    """Samples responses to queries, and analyses them: log-probabilities, entropies and values.

    trained_model: where the weights come from. scope: what names in checkpoints begin with.
    embed_queries: turns queries (batch, query_length) into contexts (batch, context_length), see
    lm_tasks.query_formatter. temperature: what logits are divided by everywhere. only_samples: the
    weights stay as they are, so copies that multiply faster may be kept of them, see
    training.precision.
    """

    def __init__(
        self,
        trained_model: TrainedModel,
        *,
        scope: str = 'policy',
        embed_queries: Callable[[torch.Tensor], torch.Tensor] = lambda queries: queries,
        temperature: float = 1.0,
        device: torch.device | None = None,
        only_samples: bool = False,
    ) -> None:
        self.trained_model = trained_model
        self.encoder = trained_model.encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.embed_queries = embed_queries
        self.temperature = temperature
        self.device = device or default_device()
        self.model = trained_model.build(scope=scope, scalar_heads=['value']).to(self.device)
        self.model.requires_grad_(not only_samples)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters of the network by their own names."""
        return dict(self.model.named_parameters())

    def get_params(self) -> list[nn.Parameter]:
        """All parameters of the network."""
        return list(self.model.parameters())

    def _step(
        self,
        tokens: torch.Tensor,
        past: Cache | None,
        past_tokens: torch.Tensor,
    ) -> dict[str, Any]:
        """A step of `sample_sequence`, after `past_tokens (batch, m)`, whose cache is `past`.

        Returns 'logits' (batch, n_vocab) and 'values' (batch,) at the last of `tokens (batch, n)`,
        and the extended cache as 'past'.
        """
        all_tokens = torch.cat([past_tokens, tokens], dim=1)
        _, mask = self.model.mask_padding(all_tokens, self.padding_token)
        cache = self.model.new_cache() if past is None else past
        length = tokens.shape[1]
        last = torch.tensor([length - 1], device=tokens.device)
        h = self.model.hidden(tokens * mask[:, -length:], mask, cache, last)[:, 0]
        return {
            'logits': self.model.logits(h),
            'values': self.model.heads['value'](h),
            'past': cache,
        }

    @torch.no_grad()
    def respond(self, queries: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
        """Sample `length` tokens after each of `queries (batch, query_length)`.

        Returns responses, logprobs and values, each (batch, length). A value is the estimate of the
        return before its token.
        """
        contexts = self.embed_queries(queries.to(self.device))
        with precision.autocast(self.device):
            result = sample_sequence(
                step=self._step,
                context=contexts,
                length=length,
                temperature=self.temperature,
                extra_outputs=('values',),
            )
        return dict(
            responses=result['tokens'][:, contexts.shape[1] :],
            logprobs=result['logprobs'],
            values=result['values'],
        )

    def analyze_responses_op(
        self,
        queries: torch.Tensor,
        responses: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Differentiable 'logprobs', 'entropies' and 'values' of `responses` to `queries`.

        queries (batch, query_length); responses (batch, response_length), like each result. Logits
        are computed only where a token of the response is predicted.
        """
        contexts = self.embed_queries(queries.to(self.device))
        responses = responses.to(self.device)
        tokens, mask = self.model.mask_padding(
            torch.cat([contexts, responses], dim=1), self.padding_token
        )
        # What predicts a token is at the position before it.
        columns = torch.arange(contexts.shape[1] - 1, tokens.shape[1] - 1, device=tokens.device)
        h = self.model.hidden(tokens[:, :-1], mask[:, :-1], output_positions=columns)
        logprobs, entropies = self.model.logprobs_and_entropies(h, responses, self.temperature)
        values = self.model.heads['value'](h)
        return dict(logprobs=logprobs, entropies=entropies, values=values)

    @torch.no_grad()
    def analyze_responses(
        self,
        queries: torch.Tensor,
        responses: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """As analyze_responses_op, without gradients."""
        return self.analyze_responses_op(queries, responses)
