"""A language model with a value head that answers queries (the original's policy.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lm_human_preferences.language.attention import KVCache
from lm_human_preferences.language.sample import sample_sequence
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import MIN_TEMPERATURE, default_device, logprobs_and_entropies


class Policy:
    """Samples responses to queries and gives their log-probabilities, entropies and values.

    embed_queries: turns queries (batch, query_length) into contexts (batch, context_length), see
        `lm_tasks.query_formatter`. Logits are divided by `temperature` everywhere.
    """

    def __init__(
        self,
        trained_model: TrainedModel,
        *,
        scope: str = 'policy',
        embed_queries: Callable[[torch.Tensor], torch.Tensor] = lambda queries: queries,
        temperature: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self.trained_model, self.scope = trained_model, scope
        self.encoder = trained_model.encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.embed_queries, self.temperature = embed_queries, temperature
        self.device = device or default_device()
        self.model = trained_model.build(scope=scope, scalar_heads=['value']).to(self.device)

    def tf_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the variable names of the original's checkpoints."""
        return self.model.tf_parameters(self.scope)

    def get_params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def _step(
        self,
        tokens: torch.Tensor,
        past: KVCache | None,
        past_tokens: torch.Tensor,
    ) -> dict[str, Any]:
        """A step of `sample_sequence`: logits and value at the last of `tokens (batch, n)`, and the
        extended cache."""
        all_tokens = torch.cat([past_tokens, tokens], dim=1)
        _, mask = self.model.mask_padding(all_tokens, self.padding_token)
        cache, length = KVCache() if past is None else past, tokens.shape[1]
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

        Returns responses, logprobs and values, each (batch, length); a value belongs to the moment
        before its token.
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
        """Differentiable log-probabilities, entropies and values of `responses (batch,
        response_length)`.

        Each result is (batch, response_length); logits are computed only where a response token is
        predicted.
        """
        contexts, responses = self.embed_queries(queries.to(self.device)), responses.to(self.device)
        tokens, mask = self.model.mask_padding(
            torch.cat([contexts, responses], dim=1), self.padding_token
        )
        columns = torch.arange(contexts.shape[1] - 1, tokens.shape[1] - 1, device=tokens.device)
        h = self.model.hidden(tokens[:, :-1], mask[:, :-1], output_positions=columns)
        logprobs, entropies = logprobs_and_entropies(
            h / max(self.temperature, MIN_TEMPERATURE),
            self.model.transformer.wte.weight,
            responses,
            gradient_type=precision.autocast_dtype(h.dtype),
        )
        return dict(logprobs=logprobs, entropies=entropies, values=self.model.heads['value'](h))

    @torch.no_grad()
    def analyze_responses(
        self,
        queries: torch.Tensor,
        responses: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The same without gradients."""
        return self.analyze_responses_op(queries, responses)
