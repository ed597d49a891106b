"""Options of tasks, which the original program defines in lm_tasks.py."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lm_human_preferences.datasets import registry
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option


@dataclass
class LoraHParams(hyperparams.HParams):
    rank: int = option(8, 'rank of the adapter of a layer', at_least=1)
    alpha: float = option(32, 'adapters are multiplied by alpha / rank', above=0)


@dataclass
class PolicyHParams(hyperparams.HParams):
    temperature: float = option(1.0, 'divides the logits, in sampling and in training', above=0)
    initial_model: str = option(
        None,
        'language model: 124M, 355M, 774M, 1558M, test, reviews, a directory, ORG/NAME',
        path=True,
    )
    lora: LoraHParams | None = own_option(
        None, 'train adapters (LoRA) on one frozen copy of the initial model'
    )

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that the model 'test' has no adapters, as each loading draws random weights."""
        yield (
            self.lora is not None and self.initial_model == 'test',
            '{lora} needs a base that stays the same: {initial_model=} is random each time',
        )


@dataclass
class TaskHParams(hyperparams.HParams):
    query_length: int = option(None, 'tokens of a query, which is cut or padded', at_least=1)
    query_dataset: str = option(
        None,
        f'where queries come from: {registry.choices()}, or a .jsonl or .csv file, a path or URL',
        path=True,
    )
    query_seed: int = own_option(
        0, 'seed of the order of the training queries, which --run.seed does not set', at_least=0
    )
    query_prefix: str = option('', 'text put before every query')
    query_suffix: str = option('', 'text put after every query')
    chat: bool = own_option(False, "build contexts by the model's chat template (docs/models.md)")
    special_tokens: bool = own_option(
        False, 'read special tokens that texts spell out (docs/models.md)'
    )
    start_text: str | None = option(
        '.', 'a query starts after this text (one token); None: at once'
    )
    end_text: str | None = option(
        None, 'a query ends with the last such text (one token); None: at query_length'
    )
    response_length: int = option(None, 'tokens of a response', at_least=1)
    truncate_token: int | None = option(
        None, 'token that ends a response, from truncate_after on; None: no token does', at_least=0
    )
    truncate_text: str | None = own_option(
        None, 'instead of truncate_token: a text of one token (docs/models.md)'
    )
    stop: bool | None = own_option(
        None, 'sample only up to the end of a response; None: if it is a chat (docs/models.md)'
    )
    truncate_after: int = option(0, 'tokens of a response before truncate_token counts', at_least=0)
    penalty_reward_value: float = option(-1, 'score of a response without a truncate_token')

    policy: PolicyHParams = field(default_factory=PolicyHParams)

    @property
    def truncates(self) -> bool:
        """Return whether a response can end before response_length."""
        return self.truncate_token is not None or bool(self.truncate_text) or self.stops

    @property
    def stops(self) -> bool:
        """Return whether sampling stops once a response has ended, before response_length."""
        return self.chat if self.stop is None else self.stop

    def lengths(self) -> dict[str, int]:
        """Return the lengths of queries and responses in tokens, by the names of their options."""
        return {'query_length': self.query_length, 'response_length': self.response_length}

    def override_from_dict(self, flat_dict: dict[str, Any]) -> None:
        """Override options; store a penalty of 4.0 as 4, as the original program needs an int."""
        super().override_from_dict(flat_dict)
        penalty = self.penalty_reward_value
        if isinstance(penalty, float) and penalty.is_integer():
            self.penalty_reward_value = int(penalty)

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that truncate_after leaves room for a truncate token in a response."""
        yield (
            self.truncates and self.truncate_after >= self.response_length,
            '{truncate_after=} must be below {response_length=}: else no truncate token counts',
        )
