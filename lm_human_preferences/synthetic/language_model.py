"""The language model `reviews`: a tiny GPT-2 that learns our film reviews when it is first asked
for."""

import hashlib
import inspect
import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.datasets import reviews
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.language import encodings, model
from lm_human_preferences.training import optimizer, precision
from lm_human_preferences.utils import core
from lm_human_preferences.utils.logging import progress

SIZES = dict(n_vocab=encodings.Reviews.n_vocab, n_ctx=16, n_embd=32, n_head=2, n_layer=2)
READ, STEPS, BATCH, LR, SEED = 16384, 1000, 64, 1e-2, 0


def directory() -> str:
    """The model directory in the cache; if need be, the model is trained first, by one process
    while others wait."""
    import filelock

    place = os.path.join(storage.cache_root(), f'reviews-{_digest()}')
    if not os.path.exists(place):
        storage.make_cache_folder(os.path.dirname(place))
        with filelock.FileLock(f'{place}.lock'):  # the kernel frees it when its holder dies
            if not os.path.exists(place):
                _make(place)
    return place


def _digest() -> str:
    """Of what the weights depend on: another text, training or network, or another PyTorch, is
    another model."""
    modules = (reviews, model, optimizer, precision, core)
    sources = [Path(__file__), *(Path(inspect.getfile(module)) for module in modules)]
    return hashlib.sha256(
        b''.join([*(p.read_bytes() for p in sources), torch.__version__.encode()])
    ).hexdigest()[:16]


def _make(place: str) -> None:
    part = f'{place}.part'
    shutil.rmtree(part, ignore_errors=True)  # of a killed process: nobody else holds the lock
    hparams = model.HParams(**SIZES)
    storage.write_json(os.path.join(part, 'hparams.json'), hparams.to_nested_dict())
    storage.write_json(os.path.join(part, 'encoding'), encodings.Reviews.name)
    checkpoints.save(part, 'model.ckpt', model.in_tf_shapes(train(hparams).tf_parameters()))
    os.rename(part, place)


def train(hparams: model.HParams, steps: int = STEPS) -> model.Model:
    """A `Model` of these sizes that has read `steps` batches of reviews; the same each time,
    whatever was drawn before."""
    encoder = encodings.Reviews.get_encoder()
    texts = as_batch(encoder, itertools.islice(reviews.reviews_generator('train'), READ))
    # Which library multiplies decides the last digits, so it is always the same, whoever asks for
    # the model first.
    with core.one_thread(), precision.onednn_preferred(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            SEED
        )  # not a GPU's as well, from which the run that asked for this draws
        network = model.Model(hparams).initialize()
        adam = optimizer.Adam(network.tf_parameters(), comm=LocalComm())
        for step in progress(range(steps), comm=LocalComm(), desc='base model', unit='batch'):
            batch = texts[torch.randint(len(texts), (BATCH,))]
            adam.minimize(
                reviews_loss(network, batch, encoder.padding_token), LR * (1 - step / steps)
            )
    return network


def as_batch(encoder: encodings.Encoder, texts: Iterable[str]) -> torch.Tensor:
    """Token ids of `texts` as one tensor (batch, longest), padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(encoder.encode(text)) for text in texts],
        batch_first=True,
        padding_value=encoder.padding_token,
    )


def reviews_loss(network: model.Model, tokens: torch.Tensor, padding_token: int) -> torch.Tensor:
    """Mean cross entropy, in nats per word, of all words of `tokens (batch, length)` after the
    first."""
    inputs, mask = network.mask_padding(tokens, padding_token)
    logits = network.logits(network.hidden(inputs[:, :-1]))
    return F.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
