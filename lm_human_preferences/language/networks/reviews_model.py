"""Language model `reviews`: a tiny GPT-2 that is trained on film reviews at its first use."""

import hashlib
import inspect
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.datasets import reviews
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.language import encodings, model
from lm_human_preferences.language.networks import attention, gpt2_files
from lm_human_preferences.language.networks import network as network_module
from lm_human_preferences.machine import precision
from lm_human_preferences.training import optimizer
from lm_human_preferences.utils import core
from lm_human_preferences.utils.logging import progress

SIZES = dict(n_vocab=encodings.Reviews.n_vocab, n_ctx=16, n_embd=32, n_head=2, n_layer=2)
N_REVIEWS = 16384
STEPS = 1000
BATCH = 64
LR = 1e-2
SEED = 0


def directory() -> str:
    """Return the model's directory in the cache; if it is missing, train the model first."""
    # The model must be trained again when a module in these lists changes.
    texts = [sys.modules[__name__], reviews]
    network = [model, network_module, attention, gpt2_files]
    training = [optimizer, precision, core]
    name = encodings.Reviews.name
    return computed_once(name, _create, [*texts, *network, *training])


def sizes() -> model.HParams:
    """Return the model's sizes, which are constants, so no file is read."""
    return model.HParams(**SIZES)


def _create(path: str) -> None:
    own_sizes = sizes()
    own_sizes.write(path)
    storage.write_json(os.path.join(path, 'encoding'), encodings.Reviews.name)
    network = train(own_sizes)
    variables = network.variable_names.variables(dict(network.named_parameters()))
    checkpoints.save(path, 'model.ckpt', variables)


def train(own_sizes: model.HParams, steps: int = STEPS) -> model.Model:
    """Train and return a `Model` on `steps` batches of reviews; the result is always the same."""
    encoder = encodings.Reviews.get_encoder()
    texts = as_batch(encoder, itertools.islice(reviews.generator('train'), N_REVIEWS))
    # One thread and float32 make the weights the same, whichever command trains the model.
    with core.one_thread(), precision.plain(), torch.random.fork_rng(devices=[]):
        # Seed only the CPU's generator, which fork_rng restores; the GPU's is not restored.
        torch.default_generator.manual_seed(SEED)
        network = model.Model(own_sizes).initialize()
        adam = optimizer.Adam(dict(network.named_parameters()), comm=Comm())
        for step in progress(range(steps), comm=Comm(), desc='base model', unit='batch'):
            batch = texts[torch.randint(len(texts), (BATCH,))]
            loss = reviews_loss(network, batch, encoder.padding_token)
            adam.minimize(loss, LR * (1 - step / steps))
    return network


def as_batch(encoder: encodings.Encoder, texts: Iterable[str]) -> torch.Tensor:
    """Return the token ids of `texts` (batch, longest), padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(encoder.encode(text)) for text in texts],
        batch_first=True,
        padding_value=encoder.padding_token,
    )


def reviews_loss(network: model.Model, tokens: torch.Tensor, padding_token: int) -> torch.Tensor:
    """Return the mean cross entropy, in nats, of tokens (batch, length) after each row's first."""
    inputs, mask = network.mask_padding(tokens, padding_token)
    logits = network.logits(network.hidden(inputs[:, :-1]))
    return F.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])


def computed_once(
    name: str, create: Callable[[str], None], depends_on: Iterable[ModuleType]
) -> str:
    """Return a cached directory, which `create` fills again if a module of `depends_on` changes."""
    import filelock

    digest = hashlib.sha256()
    for module in depends_on:
        digest.update(Path(inspect.getfile(module)).read_bytes())
    digest.update(torch.__version__.encode())
    path = os.path.join(storage.cache_root(), f'{name}-{digest.hexdigest()[:16]}')
    if os.path.exists(path):
        return path
    storage.make_cache_folder(os.path.dirname(path))
    with filelock.FileLock(f'{path}.lock'):  # the kernel releases the lock of a dead process
        if not os.path.exists(path):
            part = f'{path}.part'
            shutil.rmtree(part, ignore_errors=True)  # a killed process may have left this folder
            os.mkdir(part)
            create(part)
            os.rename(part, path)
    return path
