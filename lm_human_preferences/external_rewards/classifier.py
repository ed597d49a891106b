"""A reward that a sequence classifier of transformers gives: --rewards.trained_model DIRECTORY.

With one output that is the reward; with several classes it is the log odds of one of them. The
classifier reads text by a tokeniser of its own. Sequences of different lengths are never padded to
one: what is padding depends on the family, and on whether it knows its padding token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.errors import UserError
from lm_human_preferences.external_rewards.classifier_files import (
    read_config,
    read_model,
    read_tokeniser,
)
from lm_human_preferences.external_rewards.texts import Texts
from lm_human_preferences.language.causal_lm.library import told
from lm_human_preferences.language.exported.classifier import CONSTANT
from lm_human_preferences.utils.core import default_device

BATCH = 16_384  # tokens that go through it at a time
LARGEST = 1e30  # a constant of a reward model that `export` wrote
NO_TOKEN = -1  # that none is: a family which looks for its padding token finds none


class Classifier:
    """Asks the classifier in `directory` (path or hf://ORG/NAME), which is frozen.

    class_name: whose log odds are the reward, if there are several. chat: whether it reads the
    query and the response as a dialogue in its own template, where it has one. UserError for what
    cannot be read or is not safe to read.
    """

    def __init__(
        self, directory: str, class_name: str | None = None, *, chat: bool = False
    ) -> None:
        self.name = directory
        folder = storage.cached_directory(directory)
        config = read_config(folder)
        self._class = _class_of(config, class_name, directory)
        self._constant = _constant_of(config, directory)
        self._model = read_model(folder, config).to(default_device())
        self._tokeniser = read_tokeniser(folder, self._model)
        self._chat = chat and self._tokeniser.chat_template is not None
        self._padding = self._model.config.get_text_config().pad_token_id
        with told(directory):
            found = self._logits_of([[0, 0]])
        if found.shape != (1, config.num_labels) or not found.isfinite().all():
            raise UserError(f'{directory} gives no {config.num_labels} finite scores of a text')

    def score(self, texts: Sequence[Texts]) -> torch.Tensor:
        """Scores (texts,), float32; UserError where one is not finite."""
        rows = self._tokens(texts)
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_length.setdefault(len(row), []).append(number)
        scores = torch.empty(len(rows))
        for length, numbers in by_length.items():
            count = max(1, BATCH // length)
            for start in range(0, len(numbers), count):
                part = numbers[start : start + count]
                scores[part] = self._scores_of([rows[number] for number in part])
        if not scores.isfinite().all():
            raise UserError(f'{self.name} gives scores that are not finite')
        return scores

    def _tokens(self, texts: Sequence[Texts]) -> list[list[int]]:
        """The token ids of the texts, cut to what the classifier takes."""
        whole = [self._dialogue(each) if self._chat else each.whole for each in texts]
        # A template has the special tokens in it; elsewhere what spells one is text.
        try:
            rows = self._tokeniser(
                whole,
                truncation=True,
                add_special_tokens=not self._chat,
                split_special_tokens=not self._chat,
            )
        except Exception as e:  # of the library tokenizers, which raises no other
            reason = ' '.join(str(e).split())
            raise UserError(f'{self.name}: its tokeniser cannot read a text: {reason:.200}') from e
        for text, row in zip(whole, rows['input_ids'], strict=True):
            if not row:
                raise UserError(f'{self.name}: its tokeniser makes no token of {text!r:.60}')
        return rows['input_ids']

    def _dialogue(self, texts: Texts) -> str:
        """The query and the response in the classifier's own chat template."""
        dialogue = messages.as_messages(texts.query)
        dialogue.append({'role': 'assistant', 'content': texts.response})
        try:
            return self._tokeniser.apply_chat_template(dialogue, tokenize=False)
        except Exception as e:  # a template can raise anything
            reason = ' '.join(str(e).split())
            raise UserError(f'{self.name}: its chat template fails: {reason:.200}') from e

    def _scores_of(self, rows: list[list[int]]) -> torch.Tensor:
        """The scores of sequences of the same length, on the CPU."""
        logits = self._logits_of(rows)
        if self._class is None:
            return logits[:, 0] + self._constant
        chosen = logits[:, self._class]
        if self._model.config.problem_type == 'multi_label_classification':
            return chosen  # each class has a sigmoid of its own
        others = torch.cat([logits[:, : self._class], logits[:, self._class + 1 :]], dim=1)
        return chosen - others.logsumexp(1)

    @torch.no_grad()
    def _logits_of(self, rows: list[list[int]]) -> torch.Tensor:
        """What the classifier gives for sequences of the same length, on the CPU."""
        tokens = torch.tensor(rows, device=self._model.device)
        # Some families read the last token that is not padding, and others need one to pad with.
        is_in_text = self._padding is None or bool((tokens == self._padding).any())
        settings = self._model.config.get_text_config()
        settings.pad_token_id = NO_TOKEN if is_in_text else self._padding
        with torch.autocast(tokens.device.type, enabled=False):
            output: Any = self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        return output.logits.float().cpu()


def check(directory: str, class_name: str | None) -> None:
    """UserError where the config in a directory (path or hf://ORG/NAME) is of no classifier that
    can be asked; weights and tokeniser are not looked at."""
    _class_of(read_config(directory), class_name, directory)


def _class_of(config: Any, name: str | None, directory: str) -> int | None:
    """The number of the class called `name`; None for a classifier with one output."""
    names = [str(config.id2label.get(number)) for number in range(config.num_labels)]
    listed = ', '.join(names[:20])
    if len(names) == 1:
        if name is not None:
            raise UserError(
                f'{directory} has one output, which is the reward: {name} is none of its classes'
            )
        return None
    if name is None:
        raise UserError(
            f'{directory} has several classes, {listed}: name the one whose log odds are the'
            f' reward, by --rewards.class, or as {directory}#{names[-1]}'
        )
    if name not in names:
        raise UserError(f'{directory} has no class {name!r:.60}, but {listed}')
    if config.problem_type == 'regression':
        raise UserError(f'{directory} has several outputs that are no classes: {listed}')
    return names.index(name)


def _constant_of(config: Any, directory: str) -> float:
    """What is to be added to the scores of a reward model that `export` could not fold in."""
    constant = getattr(config, CONSTANT, 0.0)
    is_number = isinstance(constant, (int, float)) and not isinstance(constant, bool)
    if not is_number or not abs(constant) < LARGEST:
        raise UserError(f'{directory}: {CONSTANT} {constant!r:.20} is no number that can be added')
    return float(constant)
