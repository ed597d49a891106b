"""What the policy is asked to do (the original's lm_tasks.py)."""
from dataclasses import dataclass, field
from typing import Optional

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class PolicyHParams(hyperparams.HParams):
    temperature: float = option(1.0, 'divides the logits, in sampling and in every log-probability')
    initial_model: str = option(
        None, 'language model to start from: 124M, 355M, 774M, 1558M, test, reviews, or the path or URL of a directory')


@dataclass
class TaskHParams(hyperparams.HParams):
    query_length: int = option(None, 'tokens of a query: longer texts are cut, shorter ones padded', at_least=1)
    query_dataset: str = option(
        None, 'where queries come from: books, cnndm, tldr, test, reviews, or a .jsonl file of strings')
    query_prefix: str = option('', 'text put before every query')
    query_suffix: str = option('', 'text put after every query')
    start_text: Optional[str] = option('.', 'a query begins after the first of these (one token); None: at once')
    end_text: Optional[str] = option(None, 'a query ends with the last of these (one token); None: at query_length')
    response_length: int = option(None, 'tokens of a response', at_least=1)
    truncate_token: Optional[int] = option(
        None, 'a response ends with the first of these tokens at or after truncate_after; None: at response_length')
    truncate_after: int = option(0, 'tokens of a response before truncate_token counts', at_least=0)
    penalty_reward_value: int = option(-1, 'score of a response without a truncate_token')

    policy: PolicyHParams = field(default_factory=PolicyHParams)
