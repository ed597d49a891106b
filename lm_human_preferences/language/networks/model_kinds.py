"""Kinds of models, told apart without torch: OpenAI's releases by name, others by their files."""

from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.runs.run_files import ADAPTER, FROZEN_HEAD, SIZES

_SHARED = dict(n_vocab=50257, n_ctx=1024)
# {name of a released model: its sizes}
RELEASED = {
    '124M': dict(**_SHARED, n_embd=768, n_head=12, n_layer=12),
    '355M': dict(**_SHARED, n_embd=1024, n_head=16, n_layer=24),
    '774M': dict(**_SHARED, n_embd=1280, n_head=20, n_layer=36),
    '1558M': dict(**_SHARED, n_embd=1600, n_head=25, n_layer=48),
}
# {model name on the hub (after OWNER): name in RELEASED}
OTHER_NAMES = {'gpt2': '124M', 'gpt2-medium': '355M', 'gpt2-large': '774M', 'gpt2-xl': '1558M'}
# {OpenAI's first name for a model, made from a wrong parameter count: its name in RELEASED}
FIRST_NAMES = {'117M': '124M', '345M': '355M'}
OWNER = 'openai-community/'
# {id of a token at which an experiment ends responses: text of the token}
TEXTS_OF_TOKENS = {13: '.', 198: '\n'}
CONFIG_FILE = 'config.json'  # A directory that transformers saved has this file.
KIND = 'ForSequenceClassification'  # how the class name of a classifier in transformers ends
PEFT_CONFIG = 'adapter_config.json'  # The directory of a PEFT adapter has this file.


def released_name(name: str) -> str | None:
    """Return the model's name in RELEASED; None for other models, and if `name` is a directory."""
    released = FIRST_NAMES.get(name) or OTHER_NAMES.get(name.removeprefix(OWNER), name)
    return released if released in RELEASED and not storage.exists(name) else None


def hub_name(released: str) -> str:
    return OWNER + next(name for name, size in OTHER_NAMES.items() if size == released)


def directory_of(released: str) -> str:
    return f'gs://gpt-2/models/{released}'


def is_directory(directory: str | None) -> bool:
    """Return whether `directory` is the URL of a released model's directory."""
    return directory in [*map(directory_of, RELEASED)]


def is_model(directory: str) -> bool:
    """Return whether this program or the original saved a model in a directory (path or URL)."""
    return storage.exists(storage.join(directory, SIZES))


def is_saved_by_transformers(directory: str) -> bool:
    """Return whether transformers' `save_pretrained`, not this program, wrote the directory."""
    return not is_model(directory) and storage.exists(storage.join(directory, CONFIG_FILE))


def is_classifier(directory: str) -> bool:
    """Return whether a directory, local or on the hub, holds a sequence classifier."""
    if not _is_of_library(directory, CONFIG_FILE):
        return False
    return is_of_classifier(storage.read_json(storage.join(directory, CONFIG_FILE)))


def is_of_classifier(content: Any) -> bool:
    """Return whether the content of a config.json describes a sequence classifier."""
    names = content.get('architectures') if isinstance(content, dict) else None
    return isinstance(names, list) and any(str(name).endswith(KIND) for name in names)


def is_peft(directory: str) -> bool:
    """Return whether a directory, local or on the hub, holds a PEFT adapter, not a whole model."""
    return _is_of_library(directory, PEFT_CONFIG)


def _is_of_library(directory: str, config: str) -> bool:
    """Return whether a library, not this program, wrote a directory with the file `config`."""
    if storage.is_remote(directory) and not storage.is_hub(directory):
        return False
    return not is_model(directory) and storage.exists(storage.join(directory, config))


def has_adapters(directory: str) -> bool:
    """Return whether this program has saved the model as adapters of another model."""
    return storage.exists(storage.join(directory, ADAPTER))


def is_head(directory: str) -> bool:
    """Return whether the reward model in a directory is a head on frozen hidden states."""
    return storage.exists(storage.join(directory, FROZEN_HEAD))
