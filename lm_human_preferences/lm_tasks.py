"""What a task asks of a language model: where it starts, its queries, and valid responses.

The original's lm_tasks.py.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.datasets import jsonl, registry
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.hparams.task_options import PolicyHParams, TaskHParams
from lm_human_preferences.language import datasets, encodings
from lm_human_preferences.language.chat import ChatTemplate, template_of
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.trained_models import TrainedModel, known_sizes
from lm_human_preferences.synthetic import language_model

__all__ = [
    'PolicyHParams',
    'TaskHParams',
    'chat_template',
    'check_lengths',
    'check_offline',
    'check_task',
    'filter_fn_from_hparams',
    'initial_encoding',
    'initial_model',
    'make_query_sampler',
    'postprocess_fn_from_hparams',
    'query_formatter',
    'query_notes',
    'truncate_tokens',
]


def initial_model(name: str) -> TrainedModel:
    """The model that `--task.policy.initial_model` names, from which policy and reward model start.

    `reviews`, our model of film reviews, is trained first where the cache does not have it.
    """
    if name == language_model.NAME:
        return TrainedModel(name, savedir=language_model.directory())
    return TrainedModel(name)


def initial_encoding(name: str) -> Encoding:
    """The encoding of that model, which need not be there for this."""
    return encodings.Reviews if name == language_model.NAME else TrainedModel(name).encoding


def known_model(name: str) -> tuple[Sizes, Encoding] | None:
    """Sizes and encoding of that model, where they are known without any file of it; else None."""
    if name == language_model.NAME:
        return language_model.sizes(), encodings.Reviews
    released = known_sizes(name)
    return None if released is None else (released, encodings.Main)


def check_offline(hparams: TaskHParams, others: Sequence[str] = (), mode: str = 'train') -> None:
    """With LMHP_OFFLINE=1, StorageError naming all files that are needed and not on this machine.

    They are those of the initial model and of the part `mode` of the data set, and the `others`.
    What a data set or a model directory has is not known before its first file is read.
    """
    if not storage.is_offline():
        return
    model = initial_model(hparams.policy.initial_model)
    first_file = registry.info(hparams.query_dataset).first_file(mode)
    of_dataset = [hparams.query_dataset] if first_file is None else [first_file]
    storage.check_here([*model.remote_files(), *of_dataset, *others])


def truncate_tokens(hparams: TaskHParams, encoder: Encoder | None) -> frozenset[int] | None:
    """The tokens at which a response ends; None if it goes on to response_length.

    encoder: of the responses; may be None where the task names a token and no text.
    """
    if hparams.truncate_text:
        assert encoder is not None
        return _tokens_holding(encoder, hparams, 'truncate_text')
    return None if hparams.truncate_token is None else frozenset([hparams.truncate_token])


def postprocess_fn_from_hparams(
    hparams: TaskHParams,
    padding_token: int,
    encoder: Encoder | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function of responses (batch, response_length), applied before they are scored.

    It turns what follows the first truncate token at or after position `truncate_after` into
    padding. encoder: see truncate_tokens.
    """
    is_end = _is_among(truncate_tokens(hparams, encoder))

    def truncate(responses: torch.Tensor) -> torch.Tensor:
        """`responses` themselves where no token truncates, else a truncated copy."""
        if is_end is None:
            return responses
        ends = is_end(responses).long()
        ends[:, : hparams.truncate_after] = 0
        after_first = ends.cumsum(1) - ends > 0
        return responses.masked_fill(after_first, padding_token)

    return truncate


def filter_fn_from_hparams(
    hparams: TaskHParams,
    encoder: Encoder | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function of responses (batch, response_length) -> bool (batch,), whether each is valid.

    A valid response has a truncate token at or after position `truncate_after`. encoder: see
    truncate_tokens.
    """
    is_end = _is_among(truncate_tokens(hparams, encoder))

    def is_valid(responses: torch.Tensor) -> torch.Tensor:
        if is_end is None:
            return torch.ones(len(responses), dtype=torch.bool, device=responses.device)
        return is_end(responses[:, hparams.truncate_after :]).any(-1)

    return is_valid


def _is_among(tokens: frozenset[int] | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Function of token ids -> bool of the same shape, whether each is one of `tokens`."""
    if tokens is None:
        return None
    if len(tokens) == 1:
        (token,) = tokens
        return lambda ids: ids == token
    among = torch.tensor(sorted(tokens))
    return lambda ids: torch.isin(ids, among.to(ids.device))


def query_formatter(
    hparams: TaskHParams,
    encoder: Encoder,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function of queries (batch, query_length) -> contexts (batch, context_length).

    It puts the task's prefix and suffix around each query, and, for a chat, the model's template.
    """
    chat = chat_template(hparams, encoder)
    if chat is not None:
        return lambda queries: torch.tensor(
            chat.contexts(queries.tolist()), dtype=torch.int64, device=queries.device
        )
    prefix = torch.tensor(encoder.encode(hparams.query_prefix), dtype=torch.int64)
    suffix = torch.tensor(encoder.encode(hparams.query_suffix), dtype=torch.int64)

    def embed_queries(queries: torch.Tensor) -> torch.Tensor:
        prefixes = prefix.to(queries).expand(len(queries), -1)
        suffixes = suffix.to(queries).expand(len(queries), -1)
        return torch.cat([prefixes, queries, suffixes], dim=1)

    return embed_queries


def chat_template(hparams: TaskHParams, encoder: Encoder) -> ChatTemplate | None:
    """The template that makes contexts; None unless the task is a chat. UserError without one."""
    if not hparams.chat:
        return None
    affixes = hparams.query_prefix, hparams.query_suffix
    return template_of(encoder, *affixes, hparams.query_length)


def check_task(hparams: TaskHParams, encoding: Encoding, sizes: Sizes) -> None:
    """Raise UserError if the task does not suit the model.

    Its vocabulary may be another, or its `sizes` too small for the task's sequences.
    """
    token = hparams.truncate_token
    if not hparams.truncate_text and token is not None and token >= encoding.n_vocab:
        raise UserError(
            f'--task.truncate_token {token} is not in the vocabulary: encoding {encoding.name!r}'
            f' has the tokens 0 to {encoding.n_vocab - 1}'
        )
    encoder = encoding.get_encoder()
    for option in ('start_text', 'end_text', 'truncate_text'):
        _tokens_holding(encoder, hparams, option)
    check_lengths(hparams, encoder, sizes)


def check_lengths(hparams: TaskHParams, encoder: Encoder, sizes: Sizes) -> None:
    """Raise UserError if prefix, query, suffix and response are too long for a model."""
    chat = chat_template(hparams, encoder)
    if chat is not None:
        affixes, what = chat.overhead, 'the chat template'
    else:
        affixes = sum(
            len(encoder.encode(text)) for text in (hparams.query_prefix, hparams.query_suffix)
        )
        what = 'prefix and suffix'
    total = affixes + hparams.query_length + hparams.response_length
    if total > sizes.n_ctx:
        raise UserError(
            f'--task.query_length {hparams.query_length} + --task.response_length'
            f' {hparams.response_length} + {affixes} tokens of {what} are {total}, more'
            f' than the {sizes.limit} of --task.policy.initial_model {hparams.policy.initial_model}'
        )


def _tokens_holding(encoder: Encoder, hparams: TaskHParams, option: str) -> frozenset[int] | None:
    """The tokens that hold the text of an option; None without a text.

    UserError where there are none; in an encoding of the original's, where it is not one token.
    """
    text = getattr(hparams, option)
    if not text:
        return None
    with about_option(f'--task.{option}'):
        return encoder.tokens_holding(text)


class QuerySampler:
    """A call returns the next {'tokens': queries (batch_size, query_length)}.

    See make_query_sampler. position: where all ranks together are in the stream of queries: (texts
    of the epoch that rank 0 has read, sequences after them that the other ranks take). Only rank
    0's is right, because it takes the first of every `comm.size` sequences.
    """

    def __init__(
        self,
        hparams: TaskHParams,
        batch_size: int,
        comm: Comm | None,
        dataset: datasets.Dataset,
        **options: Any,
    ) -> None:
        """options: of Dataset.sequences."""
        self.hparams = hparams
        self.batch_size = batch_size
        self.dataset = dataset
        self.options = {**options, 'comm': comm}
        self.taken_by_others = comm.size - 1 if comm else 0
        self.seek((0, 0))

    def __call__(self) -> dict[str, torch.Tensor]:
        """The next batch; UserError where no text of the data set makes a query."""
        batch = list(itertools.islice(self.sequences, self.batch_size))
        if len(batch) < self.batch_size:
            name = self.hparams.query_dataset
            why = '; '.join(_left_out(self.usage(), self.hparams))
            raise UserError(f'--task.query_dataset {name} has no usable text: {why}')
        self.position = self.dataset.texts_read, self.taken_by_others
        return {'tokens': torch.tensor(batch, dtype=torch.int64)}

    def usage(self) -> datasets.Usage:
        """What becomes of the texts that the queries are made of."""
        options = {name: value for name, value in self.options.items() if name != 'comm'}
        return self.dataset.usage(**options)

    def seek(self, position: tuple[int, int]) -> None:
        """Continue from the `position` of rank 0, even of another number of ranks.

        Texts before it are not encoded again.
        """
        self.position = position
        self.sequences = self.dataset.sequences(**self.options, skip=position)


def make_query_sampler(
    *,
    hparams: TaskHParams,
    encoder: Encoder,
    batch_size: int,
    mode: str = 'train',
    comm: Comm | None = None,
    labels: str | None = None,
) -> QuerySampler:
    """A function without arguments that returns the next queries.

    They are {'tokens': (batch_size, query_length)}. mode: 'train', 'valid' or 'test', the part of
    the data set. With `comm`, each rank gets its own share. labels: source of the labels, whose
    queries may stand in for the data set (see datasets.registry).
    """
    seed = 0  # as in the original, files are read in the same order in every run
    if registry.info(hparams.query_dataset).seed_per_run:
        seed = torch.randint(2**31, ()).item()
        if comm:  # all ranks share one stream
            seed = comm.all_gather_object(seed)[0]
    # What is made up, or collected in a folder, is no file of queries.
    no_file = labels is None or labels == 'test' or os.path.isdir(labels)
    stand_in = None if no_file else labels
    chat = chat_template(hparams, encoder)
    has_affix = bool(hparams.query_prefix or hparams.query_suffix)
    return QuerySampler(
        hparams,
        batch_size,
        comm,
        datasets.get_dataset(hparams.query_dataset, labels=stand_in),
        sequence_length=hparams.query_length,
        mode=mode,
        encoder=encoder,
        seed=seed,
        start_token=_tokens_holding(encoder, hparams, 'start_text'),
        end_token=_tokens_holding(encoder, hparams, 'end_text'),
        # An empty query without prefix and suffix leaves the model nothing to continue.
        allow_empty=has_affix and chat is None,
        chat=chat,
    )


def query_notes(hparams: TaskHParams, encoder: Encoder, mode: str) -> list[str]:
    """Lines that tell users where the queries of `mode` are from, and how many texts make one.

    There are none for the data sets that come with the program. UserError where no text makes one.
    """
    name = hparams.query_dataset
    if name in registry.DATASETS:
        return []
    sampler = make_query_sampler(hparams=hparams, encoder=encoder, batch_size=1, mode=mode)
    usage = sampler.usage()
    if usage.used == 0:
        sampler()  # an error, unless a text further on makes a query
    texts = f'{usage.texts} texts' if usage.is_all else f'its first {usage.texts} texts'
    lines = [f'Queries are from {jsonl.part_of(name, mode)}: {usage.used} of {texts} are used']
    start, end = _option('start_text', hparams), _option('end_text', hparams)
    cuts = {
        f'cut up to their first {start}': usage.cut_at_start,
        f'cut at {_option("query_length", hparams)}': usage.cut_at_length,
        f'cut after their last {end}': usage.cut_at_end,
    }
    lines += [f'  {how}: {count}' for how, count in cuts.items() if count]
    return lines + [f'  left out, {reason}' for reason in _left_out(usage, hparams)]


def _left_out(usage: datasets.Usage, hparams: TaskHParams) -> list[str]:
    """Why texts make no query, by option, and how many of them."""
    start, end = _option('start_text', hparams), _option('end_text', hparams)
    reasons = {
        f'without {start}': usage.no_start,
        f'without {end} in {_option("query_length", hparams)}': usage.no_end,
        'empty': usage.empty,
        f'too long for {_option("query_length", hparams)} in the chat template': usage.too_long,
        'refused by the chat template': usage.refused,
    }
    return [f'{reason}: {count}' for reason, count in reasons.items() if count]


def _option(name: str, hparams: TaskHParams) -> str:
    return f'--task.{name} {getattr(hparams, name)!r}'
