"""What the policy is asked to do (the original's lm_tasks.py)."""

from dataclasses import dataclass, field
from typing import Any

from lm_human_preferences.datasets import registry
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class PolicyHParams(hyperparams.HParams):
    temperature: float = option(
        1.0, 'divides the logits, both in sampling and in log-probabilities', above=0
    )
    initial_model: str = option(
        None,
        'language model to start from: 124M (or gpt2), 355M, 774M, 1558M, test, reviews, a'
        ' directory, ORG/NAME of the hub',
    )


@dataclass
class TaskHParams(hyperparams.HParams):
    query_length: int = option(
        None, 'tokens of a query: longer texts are cut, shorter ones padded', at_least=1
    )
    query_dataset: str = option(
        None,
        f'where queries come from: {registry.choices()}, or a .jsonl file of texts, a path or URL',
    )
    query_prefix: str = option('', 'text put before every query')
    query_suffix: str = option('', 'text put after every query')
    chat: bool = option(
        False,
        'contexts by the chat template of the model, of queries that are texts or lists of messages'
        ' (docs/models.md)',
        ours=True,
    )
    start_text: str | None = option(
        '.',
        'a query starts after the first occurrence of this text (one token); None: at once',
    )
    end_text: str | None = option(
        None,
        'a query ends with the last occurrence of this text (one token); None: at query_length',
    )
    response_length: int = option(None, 'tokens of a response', at_least=1)
    truncate_token: int | None = option(
        None,
        'a response ends with the first of these tokens at or after truncate_after; None: at'
        ' response_length',
        at_least=0,
    )
    truncate_text: str | None = option(
        None,
        'a response ends with the first token that holds this text; goes before truncate_token'
        ' (docs/models.md)',
        ours=True,
    )
    truncate_after: int = option(0, 'tokens of a response before truncate_token counts', at_least=0)
    penalty_reward_value: float = option(-1, 'score of a response without a truncate_token')

    policy: PolicyHParams = field(default_factory=PolicyHParams)

    @property
    def truncates(self) -> bool:
        """Whether a response can end before response_length."""
        return self.truncate_token is not None or bool(self.truncate_text)

    def lengths(self) -> dict[str, int]:
        """{'query_length', 'response_length'}: how many tokens each text of a question has."""
        return {'query_length': self.query_length, 'response_length': self.response_length}

    def override_from_dict(self, flat_dict: dict[str, Any], separator: str = '.') -> None:
        """See HParams.

        A whole-number penalty stays an int, so that the original, whose files hold ints, can read
        ours.
        """
        super().override_from_dict(flat_dict, separator)
        penalty = self.penalty_reward_value
        if isinstance(penalty, float) and penalty.is_integer():
            self.penalty_reward_value = int(penalty)

    def validate(self) -> None:
        """Also ValueError if no response can hold a truncate token that counts."""
        super().validate()
        if self.truncates and self.truncate_after >= self.response_length:
            after = self.option_name('truncate_after')
            length = self.option_name('response_length')
            raise ValueError(
                f'{after} {self.truncate_after} must be below'
                f' {length} {self.response_length}: otherwise no truncate token'
                ' counts and every response scores the penalty'
            )
