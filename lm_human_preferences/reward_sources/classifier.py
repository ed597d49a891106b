"""Reward by a sequence classifier for the library transformers: --rewards.trained_model DIRECTORY.

The reward is its single output, or the log odds of one of its classes. The classifier has a
tokeniser of its own. Sequences of different lengths are never padded to one length, since the
effect of padding depends on the model family. Many families score at the last token that is not the
padding token. That is kept even for a template that ends with the padding token, since the model
was trained that way. Files that can hold code are not read: pickles, and what `auto_map` names.
"""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.library import (
    PretrainedWeights,
    config_of,
    explained,
)
from lm_human_preferences.language.networks.model_kinds import CONFIG_FILE, is_of_classifier
from lm_human_preferences.language.texts.tokenisers import failing
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.reward_sources.texts import LARGEST, Texts, TextScorer
from lm_human_preferences.storage.schema import matches_schema
from lm_human_preferences.utils.rendering import TemplateError, render

BATCH = 16_384  # largest number of tokens in one forward pass
# transformers needs a padding token to score several texts; a model without one gets NO_TOKEN.
# transformers reads a score at the last token other than padding, and no token is NO_TOKEN.
NO_TOKEN = -1
MODEL_CLASS = 'AutoModelForSequenceClassification'
MOST_LABELS = 10_000  # a config with more labels than this counts as damaged
TYPES = 'token_type_ids'  # transformers' name for the input with segment numbers
Tokens = list[tuple[int, int]]  # a text's tokens as [(token id, segment type), ...]
_AS_SAVED = {'sinusoidal_pos_embds': False}  # position embeddings are loaded, not computed


class Classifier(TextScorer):
    """Frozen classifier that scores a text by its only output, or by the log odds of a class."""

    def __init__(
        self, directory: str, class_name: str | None = None, *, chat: bool = False
    ) -> None:
        self.name = directory
        folder = storage.cached_directory(directory)
        config = read_config(folder)
        self._class = _class_of(config, class_name, directory)
        self._model = read_model(folder, config).to(default_device())
        self._tokeniser = read_tokeniser(folder, self._model)
        self._chat = chat and self._tokeniser.chat_template is not None
        settings = self._model.config.get_text_config()
        if settings.pad_token_id is None:
            settings.pad_token_id = NO_TOKEN
        with explained(directory):
            self._constant = float(getattr(config, 'reward_constant', 0.0))
            found = self._logits_of([[(0, 0), (0, 0)]]) + self._constant
        if found.shape != (1, config.num_labels) or not found.isfinite().all():
            raise UserError(f'{directory}: a text must get {config.num_labels} finite scores')

    def score(self, texts: Sequence[Texts]) -> torch.Tensor:
        """Return scores (texts,), float32; UserError if a score is not finite."""
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
        wrong = scores[~(scores.abs() <= LARGEST)]  # NaN is wrong, too: it is not <= LARGEST
        if len(wrong):
            raise UserError(
                f'{self.name} gives the score {wrong[0].item():g}: a reward must be finite, of at'
                f' most {LARGEST:g} in size'
            )
        return scores

    def _tokens(self, texts: Sequence[Texts]) -> list[Tokens]:
        """Return each text's (token, type) pairs, cut to the classifier's limit."""
        whole = [self._dialogue(each) if self._chat else each.whole for each in texts]
        # A rendered chat template contains special tokens; in plain texts '[SEP]' is ordinary text.
        with failing('read', whole, f'{self.name}: its tokeniser'):
            rows = self._tokeniser(
                whole,
                truncation=True,
                add_special_tokens=not self._chat,
                split_special_tokens=not self._chat,
            )
        pairs = []
        all_types = rows.get(TYPES, itertools.repeat(itertools.repeat(0)))
        for text, row, types in zip(whole, rows['input_ids'], all_types):
            if not row:
                raise UserError(f'{self.name}: its tokeniser returns no tokens for {text!r:.60}')
            pairs.append(list(zip(row, types)))
        return pairs

    def _dialogue(self, texts: Texts) -> str:
        dialogue = messages.as_messages(texts.query)
        if dialogue[-1]['role'] == messages.ASSISTANT:  # the response continues this message
            dialogue[-1]['content'] += texts.whole[len(texts.query) :]
        else:
            dialogue.append({'role': messages.ASSISTANT, 'content': texts.response})
        try:
            return render(self._tokeniser, dialogue)
        except TemplateError as e:
            reason = ' '.join(str(e).split())
            raise UserError(f'{self.name}: its chat template fails: {reason:.200}') from e

    def _scores_of(self, rows: list[Tokens]) -> torch.Tensor:
        """Return the scores of sequences of the same length, on the CPU."""
        logits = self._logits_of(rows)
        if self._class is None:
            return logits[:, 0] + self._constant
        chosen = logits[:, self._class]
        if self._model.config.problem_type == 'multi_label_classification':
            return chosen  # with a sigmoid for each class, a logit is the log odds
        others = torch.cat([logits[:, : self._class], logits[:, self._class + 1 :]], dim=1)
        return chosen - others.logsumexp(1)

    @torch.no_grad()
    def _logits_of(self, rows: list[Tokens]) -> torch.Tensor:
        """Return the classifier's logits for sequences of the same length, on the CPU."""
        tokens, types = torch.tensor(rows, device=self._model.device).unbind(2)
        inputs = {'input_ids': tokens, 'attention_mask': torch.ones_like(tokens)}
        if types.any() and TYPES in inspect.signature(self._model.forward).parameters:
            inputs[TYPES] = types  # XLNet's tokeniser gives the last token a type of its own
        with torch.autocast(tokens.device.type, enabled=False):
            output: Any = self._model(**inputs)
        return output.logits.float().cpu()


def _class_of(config: Any, name: str | None, directory: str) -> int | None:
    """Return the index of class `name`; None for a single output; UserError for a wrong `name`."""
    names = [str(config.id2label.get(number)) for number in range(config.num_labels)]
    if len(names) == 1 and name is None:
        return None
    if len(names) > 1 and config.problem_type == 'regression':
        raise UserError(
            f'{directory} predicts {len(names)} numbers, none of which can be chosen as the reward:'
            ' give a classifier, or a model with a single output'
        )
    if len(names) > 1 and name in names:
        return names.index(name)
    raise UserError(
        f'{directory} has the outputs {", ".join(names[:20])}: to choose the class whose log odds'
        f' are the reward, set --rewards.class_name or write {directory}#{names[-1]} (a single'
        ' output needs no class name)'
    )


def read_config(directory: str) -> Any:
    """Return the config of a classifier, without dropout; UserError if it is not supported."""
    path = storage.join(directory, CONFIG_FILE)
    content: Any = storage.read_json(path)
    if not is_of_classifier(content):
        raise UserError(f'{path} does not describe a sequence classifier')
    if content.get('auto_map'):
        raise UserError(f'{path}: the model needs code of its own (auto_map); code is never run')
    if not matches_schema(content.get('num_labels', 1), range(1, MOST_LABELS + 1)):
        raise UserError(f'{path}: num_labels must be 1 to {MOST_LABELS}')
    as_saved = {key: value for key, value in _AS_SAVED.items() if key in content}
    return config_of({**content, **as_saved}, path)


def read_model(directory: str, config: Any) -> Any:
    """Load a classifier in float32; UserError if weights are missing or not finite."""
    weights = PretrainedWeights(directory, config, MODEL_CLASS)
    model = weights.model
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f'{directory}: {name} has values that are not finite')
    return model.eval().requires_grad_(False)


def read_tokeniser(directory: str, model: Any) -> Any:
    """Load the tokeniser of a classifier; UserError if the model lacks some of the tokens."""
    from transformers import AutoTokenizer

    with explained(directory, ': its tokeniser cannot be read'):
        tokeniser = AutoTokenizer.from_pretrained(
            directory, config=model.config, local_files_only=True, trust_remote_code=False
        )
        tokens = tokeniser.get_vocab().values()
    rows = len(model.get_input_embeddings().weight)
    if not tokens or max(tokens) >= rows:
        raise UserError(
            f'{directory}: the tokeniser has {len(tokens)} tokens, with ids up to'
            f' {max(tokens, default=0)}, but the model has only {rows} embeddings'
        )
    tokeniser.truncation_side = 'left'  # a text that is too long loses its beginning
    tokeniser.model_max_length = _limit(tokeniser, model)
    return tokeniser


def _limit(tokeniser: Any, model: Any) -> int:
    """Return the largest number of tokens that a classifier takes."""
    settings = model.config.get_text_config()
    limits = [tokeniser.model_max_length, getattr(settings, 'max_position_embeddings', None)]
    for name, module in model.named_modules():
        # Some model families number positions from padding_idx + 1.
        if name.endswith('position_embeddings') and isinstance(module, torch.nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - first)
    return min(limit for limit in [*limits, 1 << 20] if type(limit) is int and limit > 0)
