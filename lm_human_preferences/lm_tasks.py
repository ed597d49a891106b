"""Tasks: initial model, queries, and how responses must end (the original's lm_tasks.py)."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lm_human_preferences.datasets import jsonl, registry
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.task_options import PolicyHParams as PolicyHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language import datasets, encodings
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.networks.gpt2_files import HParams
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.texts.chat import (
    ChatTemplate,
    Contexts,
    template_of,
    whole_texts,
)
from lm_human_preferences.language.trained_models import TrainedModel, known_sizes


def initial_model(name: str) -> TrainedModel:
    """Return the initial model `name`; the model `reviews` is first trained unless it is cached."""
    if name == encodings.Reviews.name:
        from lm_human_preferences.language.networks import reviews_model

        return TrainedModel(name, savedir=reviews_model.directory())
    return TrainedModel(name)


def initial_encoding(name: str) -> Encoding:
    """Return the encoding of the model called `name`; unlike initial_model, never train a model."""
    return encodings.Reviews if name == encodings.Reviews.name else TrainedModel(name).encoding


def known_model(name: str) -> tuple[HParams, Encoding] | None:
    """Return (sizes, encoding) of the model `name`, or None if one must read the model's files."""
    if name == encodings.Reviews.name:
        from lm_human_preferences.language.networks import reviews_model

        return reviews_model.sizes(), encodings.Reviews
    released = known_sizes(name)
    return None if released is None else (released, encodings.Main)


def truncate_tokens(hparams: TaskHParams, encoder: Encoder | None) -> frozenset[int] | None:
    """Return the tokens that end responses, None if none do; UserError if --task.stop needs one."""
    token = hparams.truncate_token
    if hparams.truncate_text:
        assert encoder is not None
        token = _token_of(encoder, hparams, 'truncate_text')
    if token is not None:
        return frozenset([token])
    if not hparams.stops:
        return None
    assert encoder is not None
    ends = encoder.own_ends()
    chat = chat_template(hparams, encoder)
    if chat is not None:
        ends |= chat.ends
    if not ends:
        raise UserError(
            f'--task.stop: --task.policy.initial_model {hparams.policy.initial_model} names no'
            ' token that ends a response in generation_config.json, config.json or a chat template:'
            ' give --task.truncate_text, or --task.stop off'
        )
    return ends


def end_of_text(hparams: TaskHParams, encoder: Encoder) -> int | None:
    """Return the end token to add to a response that is given as text; None if there is none.

    A text does not show this token, which ends the sampled responses that are whole.
    """
    if not hparams.stops:
        return None
    chat = chat_template(hparams, encoder)
    ends = (chat.ends if chat is not None else None) or encoder.own_ends()
    return min(ends & (truncate_tokens(hparams, encoder) or frozenset()), default=None)


def end_notes(hparams: TaskHParams, encoder: Encoder) -> list[str]:
    """Return one line that names the tokens that end a response; no line without --task.stop."""
    if not hparams.stops:
        return []
    ends = sorted(truncate_tokens(hparams, encoder) or ())
    spelled = ', '.join(f'{encoder.decode([token])!r} ({token})' for token in ends[:8])
    more = f' and {len(ends) - 8} more' if len(ends) > 8 else ''
    return [f'A response ends with {spelled}{more}, or after {hparams.response_length} tokens']


def policy_settings(hparams: TaskHParams, encoder: Encoder) -> dict[str, Any]:
    """Return the keyword arguments of Policy that depend on the task."""
    is_among = _is_among(truncate_tokens(hparams, encoder)) if hparams.stops else None

    def is_end(tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Return whether each of `tokens (batch,)` ends the response in its row: bool (batch,)."""
        assert is_among is not None
        if position < hparams.truncate_after:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return is_among(tokens)

    return dict(
        embed_queries=query_formatter(hparams, encoder),
        temperature=hparams.policy.temperature,
        is_end=is_end if hparams.stops else None,
    )


def postprocess_fn_from_hparams(
    hparams: TaskHParams, padding_token: int, encoder: Encoder | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that pads responses (batch, response_length) after their ends."""
    is_end = _is_among(truncate_tokens(hparams, encoder))

    def truncate(responses: torch.Tensor) -> torch.Tensor:
        """Pad `responses (batch, response_length)` after their ends."""
        if is_end is None:
            return responses
        ends = is_end(responses).long()
        ends[:, : hparams.truncate_after] = 0
        after_first = ends.cumsum(1) - ends > 0
        return responses.masked_fill(after_first, padding_token)

    return truncate


def filter_fn_from_hparams(
    hparams: TaskHParams, encoder: Encoder | None = None, *, anywhere: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that finds which responses (batch, length) have an end token.

    anywhere: whether an end before --task.truncate_after counts, too.
    """
    is_end = _is_among(truncate_tokens(hparams, encoder))
    first = 0 if anywhere else hparams.truncate_after

    def is_valid(responses: torch.Tensor) -> torch.Tensor:
        if is_end is None:
            return torch.ones(len(responses), dtype=torch.bool, device=responses.device)
        return is_end(responses[:, first:]).any(-1)

    return is_valid


def _is_among(tokens: frozenset[int] | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function from ids to bool, True for ids in `tokens`; None if `tokens` is None."""
    if tokens is None:
        return None
    among = torch.tensor(sorted(tokens))
    return lambda ids: torch.isin(ids, among.to(ids.device, non_blocking=True))


def query_formatter(
    hparams: TaskHParams, encoder: Encoder
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that maps queries (batch, query_length) to contexts (batch, length)."""
    contexts = contexts_of(hparams, encoder)
    if contexts is not None:
        return lambda queries: torch.tensor(
            contexts.contexts(queries.tolist()), dtype=torch.int64, device=queries.device
        )
    prefix, suffix = map(torch.tensor, _affixes(hparams, encoder))

    def embed_queries(queries: torch.Tensor) -> torch.Tensor:
        prefixes = prefix.to(queries).expand(len(queries), -1)
        suffixes = suffix.to(queries).expand(len(queries), -1)
        return torch.cat([prefixes, queries, suffixes], dim=1)

    return embed_queries


def _affixes(hparams: TaskHParams, encoder: Encoder) -> tuple[list[int], list[int]]:
    """Return the tokens before and after every query of a task whose `contexts_of` is None."""
    encoder = tokenisers.text_encoder(encoder, hparams.special_tokens)
    return encoder.encode(hparams.query_prefix), encoder.encode(hparams.query_suffix)


def contexts_of(hparams: TaskHParams, encoder: Encoder) -> Contexts | None:
    """Return a maker of contexts from queries; None if contexts are prefix + query + suffix."""
    if hparams.chat:
        return chat_template(hparams, encoder)
    encoder = tokenisers.text_encoder(encoder, hparams.special_tokens)
    if not isinstance(encoder, tokenisers.TokeniserEncoder) or not encoder.adds_space:
        return None
    return whole_texts(encoder, hparams.query_prefix, hparams.query_suffix, hparams.query_length)


def chat_template(hparams: TaskHParams, encoder: Encoder) -> ChatTemplate | None:
    """Return the chat template, or None if --task.chat is off; UserError if the model has none."""
    if not hparams.chat:
        return None
    affixes = hparams.query_prefix, hparams.query_suffix
    return template_of(encoder, *affixes, hparams.query_length)


def check_task(hparams: TaskHParams, encoding: Encoding, sizes: Sizes) -> None:
    """Raise UserError unless the task suits the model's vocabulary and context length."""
    token = hparams.truncate_token
    if not hparams.truncate_text and token is not None and token >= encoding.n_vocab:
        raise UserError(
            f'--task.truncate_token {token} is not in the vocabulary: encoding {encoding.name!r}'
            f' has the tokens 0 to {encoding.n_vocab - 1}'
        )
    encoder = encoding.get_encoder()
    for option in ('start_text', 'end_text', 'truncate_text'):
        _token_of(encoder, hparams, option)
    check_lengths(hparams, encoder, sizes)


def check_lengths(hparams: TaskHParams, encoder: Encoder, sizes: Sizes) -> None:
    """Raise UserError if prefix, query, suffix and response exceed the model's context."""
    contexts = contexts_of(hparams, encoder)
    if contexts is not None:
        affixes = contexts.overhead
        source = 'the chat template' if hparams.chat else 'prefix and suffix'
    else:
        prefix, suffix = _affixes(hparams, encoder)
        affixes, source = len(prefix) + len(suffix), 'prefix and suffix'
    total = affixes + hparams.query_length + hparams.response_length
    if total > sizes.n_ctx:
        raise UserError(
            f'--task.query_length {hparams.query_length} + --task.response_length'
            f' {hparams.response_length} + {affixes} tokens of {source} are {total}, more'
            f' than the {sizes.n_ctx} of --task.policy.initial_model {hparams.policy.initial_model}'
        )


def _token_of(encoder: Encoder, hparams: TaskHParams, option: str) -> int | None:
    """Return the token that `option` gives as text, if any; UserError for a text of many tokens."""
    text = getattr(hparams, option)
    if not text:
        return None
    with about_option(f'--task.{option}'):
        return encoder.single_token(text)


@dataclasses.dataclass(eq=False)
class QuerySampler:
    """Stream of query batches, which can continue at a `position` after a restart.

    position: numbers of texts that rank 0 has read and of later queries that other ranks took.
    """

    hparams: TaskHParams
    batch_size: int
    comm: Comm | None
    dataset: datasets.Dataset
    rules: datasets.QueryRules

    def __post_init__(self) -> None:
        self.taken_by_others = self.comm.size - 1 if self.comm else 0
        self.seek((0, 0))

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return a batch {'tokens': (batch_size, query_length)}; UserError if no text is usable."""
        batch = list(itertools.islice(self.sequences, self.batch_size))
        if len(batch) < self.batch_size:
            name = self.hparams.query_dataset
            usage, _ = self.dataset.usage(self.rules)
            why = '; '.join(_left_out(usage, self.hparams))
            raise UserError(f'--task.query_dataset {name} has no usable text: {why}')
        self.position = self.dataset.texts_read, self.taken_by_others
        return {'tokens': torch.tensor(batch, dtype=torch.int64)}

    def seek(self, position: tuple[int, int]) -> None:
        """Continue the stream at rank 0's `position`, even if the number of ranks has changed."""
        self.position = position
        self.sequences = self.dataset.sequences(self.rules, comm=self.comm, skip=position)


def make_query_sampler(
    hparams: TaskHParams,
    *,
    encoder: Encoder,
    batch_size: int,
    mode: str = 'train',
    comm: Comm | None = None,
    labels: str | None = None,
) -> QuerySampler:
    """Return the sampler of a task's queries. labels: label file to use if a data set is lost."""
    # As in the original, every run reads files in the same order unless query_seed is set.
    seed = hparams.query_seed if mode == 'train' else 0
    if registry.info(hparams.query_dataset).seed_per_run:
        seed = int(torch.randint(2**31, ()))
        if comm:  # all ranks read the same stream, so they need the same seed
            seed = comm.all_gather_object(seed)[0]
    contexts = contexts_of(hparams, encoder)
    encoder = tokenisers.text_encoder(encoder, hparams.special_tokens)
    # Queries can be read from a label file, but not from a folder or from simulated labels.
    no_file = labels is None or labels == 'test' or os.path.isdir(labels)
    stand_in = None if no_file else labels
    has_affix = bool(hparams.query_prefix or hparams.query_suffix)
    rules = datasets.QueryRules(
        hparams.query_length,
        mode,
        encoder,
        seed=seed,
        start_token=_token_of(encoder, hparams, 'start_text'),
        end_token=_token_of(encoder, hparams, 'end_text'),
        # An empty query needs a prefix or suffix, so that the model has something to continue.
        allow_empty=has_affix and not hparams.chat,
        contexts=contexts,
    )
    dataset = datasets.get_dataset(hparams.query_dataset, labels=stand_in)
    return QuerySampler(hparams, batch_size, comm, dataset, rules)


def query_columns(
    hparams: TaskHParams, encoder: Encoder
) -> dict[tuple[int, ...], Mapping[str, Any]]:
    """Return a dict from the tokens of each padded query to its columns in the user's data set.

    Built-in data sets have none: {}. UserError if records with the same query differ in columns.
    """
    name = hparams.query_dataset
    found: list[tuple[list[int], jsonl.Query]] = []
    if name in registry.DATASETS:
        return {}
    rules = make_query_sampler(hparams, encoder=encoder, batch_size=1).rules
    for file in filter(None, (name, jsonl.file_of_test_part(name))):
        for query in jsonl.read_queries(file):
            tokens, use = rules.query_of(query.text)
            if use in (datasets.USED, datasets.CUT):
                padding = [encoder.padding_token] * (hparams.query_length - len(tokens))
                found.append((tokens + padding, query))
    return columns_by_tokens(found)


def columns_by_tokens(
    queries: Iterable[tuple[Sequence[int], jsonl.Query]],
) -> dict[tuple[int, ...], Mapping[str, Any]]:
    """Return {a query's tokens: other columns of its record}; UserError if two records conflict."""
    found: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for tokens, query in queries:
        if found.setdefault(tuple(tokens), query.columns) != query.columns:
            raise UserError(
                f'{query.where}: another record has the same query with other values in its'
                ' columns, so a reward function cannot tell the records apart: leave one out'
            )
    return found


def query_notes(hparams: TaskHParams, encoder: Encoder, mode: str) -> list[str]:
    """Return lines that say how many of a user's texts are used; UserError if no text can be."""
    name = hparams.query_dataset
    if name in registry.DATASETS:
        return []
    sampler = make_query_sampler(hparams, encoder=encoder, batch_size=1, mode=mode)
    usage, is_all = sampler.dataset.usage(sampler.rules)
    used, cut = usage[datasets.USED], usage[datasets.CUT]
    if used + cut == 0:
        sampler()  # Sampling raises UserError if the whole data set has no usable text.
    texts = f'{usage["texts"]} texts' if is_all else f'its first {usage["texts"]} texts'
    lines = [f'Queries are from {jsonl.part_of(name, mode)}: {used + cut} of {texts} are used']
    if cut:
        lines.append(f'  cut by --task.start_text, --task.end_text or --task.query_length: {cut}')
    return lines + [f'  left out, {reason}' for reason in _left_out(usage, hparams)]


def _left_out(usage: Mapping[str, int], hparams: TaskHParams) -> list[str]:
    """Return ['REASON: COUNT', ...] for the texts of a data set that are not used."""
    length = f'--task.query_length {hparams.query_length}'
    reasons = {
        f'without --task.start_text {hparams.start_text!r}': usage['no_start'],
        f'without --task.end_text {hparams.end_text!r} in {length}': usage['no_end'],
        'empty': usage['empty'],
        f'too long for {length} in their contexts': usage['too_long'],
        'refused by the chat template': usage['refused'],
    }
    return [f'{reason}: {count}' for reason, count in reasons.items() if count]
