"""Policy: a language model with a value head (policy.py in OpenAI's release)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lm_human_preferences.language.networks.attention import BlockInputs, Unpadding
from lm_human_preferences.language.networks.network import HEADS
from lm_human_preferences.language.sample import Decoding, sample_sequence
from lm_human_preferences.machine import precision
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.utils.core import TokenIds, digest_of, token_ids

if TYPE_CHECKING:
    from lm_human_preferences.language.trained_models import TrainedModel

# Responses to a query are concatenated into one row, so that the query is computed only once.
# Rows of more responses are not faster: attention also computes scores between responses.
MOST_IN_A_ROW = 8


def responses_in_a_row(samples_per_query: int) -> int:
    """Return how many responses to a query are concatenated into one row of a forward pass."""
    return max(n for n in range(1, MOST_IN_A_ROW + 1) if samples_per_query % n == 0)


class Policy:
    """Language model that samples responses to queries and analyses them.

    embed_queries: maps queries (batch, query_length) to contexts (batch, context_length).
    is_end: see sample_sequence; None: always full length. only_samples: True freezes the weights.
    """

    def __init__(
        self,
        trained_model: TrainedModel,
        *,
        scope: str = 'policy',
        embed_queries: Callable[[torch.Tensor], torch.Tensor] = lambda queries: queries,
        temperature: float = 1.0,
        is_end: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        device: torch.device | None = None,
        only_samples: bool = False,
    ) -> None:
        self.trained_model = trained_model
        self.encoder = trained_model.encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.embed_queries = embed_queries
        self.temperature = temperature
        self.is_end = is_end
        self.device = device or default_device()
        self.model = trained_model.build(scope=scope, scalar_heads=['value']).to(self.device)
        if only_samples:
            self.model.requires_grad_(False)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return {name: parameter}, without frozen parameters shared with other networks."""
        return self.model.own_parameters()

    def digest(self) -> str:
        """Return the SHA-256 of the weights that affect sampling: all weights except the heads'."""
        weights = {}
        for name, parameter in self.model.named_parameters():
            if not name.startswith(HEADS):
                weights[name] = parameter.cpu()
        return digest_of(weights)

    def _outputs(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits and values of `h (rows, n_embd)`."""
        return {'logits': self.model.logits(h), 'values': self.model.heads['value'](h)}

    def get_params(self) -> list[nn.Parameter]:
        """Return the values of `parameters_by_name` as a list."""
        return list(self.parameters_by_name().values())

    @torch.no_grad()
    def respond(
        self, queries: TokenIds, length: int, samples_per_query: int = 1
    ) -> dict[str, torch.Tensor]:
        """Sample 'responses', 'logprobs' and 'values' (batch, length), padded after each response.

        samples_per_query: number of neighbouring rows of `queries (batch, query_length)` that
        repeat one query, which is computed once. Logprobs and values are padded with 0.
        """
        contexts = self.embed_queries(token_ids(queries)[::samples_per_query])
        with precision.autocast(self.device):
            rows = Decoding(self.model, contexts, self.padding_token, length)
            rows.repeat(samples_per_query)
            sampled = sample_sequence(
                rows=rows,
                outputs=self._outputs,
                length=length,
                temperature=self.temperature,
                is_end=self.is_end,
                padding_token=self.padding_token,
            )
        return dict(
            responses=sampled['tokens'], logprobs=sampled['logprobs'], values=sampled['values']
        )

    def mask_of(self, responses: torch.Tensor) -> torch.Tensor | None:
        """Return bool (batch, length), False at padding; None if responses have a fixed length."""
        return None if self.is_end is None else responses != self.padding_token

    def analyze_responses_op(
        self,
        queries: TokenIds,
        responses: TokenIds,
        samples_per_query: int = 1,
        blocks: Sequence[int] = (),
    ) -> dict[str, torch.Tensor]:
        """Return differentiable logprobs, entropies and values (batch, length), 0 at padding.

        samples_per_query: see respond. blocks: the result also has the inputs of these blocks
        at the position that predicts each token: 'states' (blocks, batch, length, n_embd).
        """
        kept = BlockInputs(blocks)
        # Keep token ids in host memory, so that finding the padding does not wait for the GPU.
        responses = token_ids(responses)
        real = responses != self.padding_token
        longest = int(np.flatnonzero(real.numpy().any(0)).max()) + 1
        left_out = responses.shape[1] - longest
        responses = responses[:, :longest]
        unpadding = Unpadding(responses.shape, real[:, :longest]).to(self.device)
        h = self._hidden_before(queries, responses, samples_per_query, kept)
        h = unpadding.unpad(h)
        logprobs, entropies = self.model.logprobs_and_entropies(
            h, unpadding.unpad(responses.to(self.device, non_blocking=True)), self.temperature
        )
        values = self.model.heads['value'](h)

        def padded(outputs: torch.Tensor) -> torch.Tensor:
            return F.pad(unpadding.pad(outputs), (0, left_out))

        outputs = dict(
            logprobs=padded(logprobs), entropies=padded(entropies), values=padded(values)
        )
        if blocks:
            states = kept.stacked().reshape(len(blocks), *responses.shape, -1)
            outputs['states'] = F.pad(states, (0, 0, 0, left_out))
        return outputs

    analyze_responses = torch.no_grad()(analyze_responses_op)

    @torch.no_grad()
    def states(
        self,
        queries: torch.Tensor,
        responses: torch.Tensor,
        samples_per_query: int,
        blocks: Sequence[int],
    ) -> torch.Tensor:
        """Return only the 'states' that analyze_responses returns for the given `blocks`."""
        kept = BlockInputs(blocks)
        self._hidden_before(queries, responses.cpu(), samples_per_query, kept)
        return kept.stacked().reshape(len(blocks), *responses.shape, -1)

    def _hidden_before(
        self,
        queries: TokenIds,
        responses: torch.Tensor,
        samples_per_query: int,
        kept: BlockInputs,
    ) -> torch.Tensor:
        """Return the network's outputs that predict each token: (batch, length, n_embd).

        responses: (batch, length), in host memory.
        """
        contexts = self.embed_queries(token_ids(queries))
        together = responses_in_a_row(samples_per_query)
        # The network predicts a token at the position before it.
        completions = responses[:, :-1].unflatten(0, (-1, together))
        prompts = contexts[::together]
        h = self.model.completion_hidden(prompts, completions, self.padding_token, kept)
        return h.flatten(0, 1)
