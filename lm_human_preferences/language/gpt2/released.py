"""OpenAI's releases of GPT-2: models by name, and tokens that experiments use."""

from lm_human_preferences import storage

_SHARED = dict(n_vocab=50257, n_ctx=1024)
# Sizes of the released models by name.
RELEASED = {
    '124M': dict(**_SHARED, n_embd=768, n_head=12, n_layer=12),
    '355M': dict(**_SHARED, n_embd=1024, n_head=16, n_layer=24),
    '774M': dict(**_SHARED, n_embd=1280, n_head=20, n_layer=36),
    '1558M': dict(**_SHARED, n_embd=1600, n_head=25, n_layer=48),
}
# {name on the hub, without OWNER: name in RELEASED}
OTHER_NAMES = {'gpt2': '124M', 'gpt2-medium': '355M', 'gpt2-large': '774M', 'gpt2-xl': '1558M'}
# {OpenAI's first name, from a wrong count of parameters: name in RELEASED}
FIRST_NAMES = {'117M': '124M', '345M': '355M'}
OWNER = 'openai-community/'
# {token at which experiments end a response: its text}
TEXTS_OF_TOKENS = {13: '.', 198: '\n'}


def released_name(name: str) -> str | None:
    """Return the name of a model in RELEASED; None for any other name, and for a directory."""
    released = FIRST_NAMES.get(name) or OTHER_NAMES.get(name.removeprefix(OWNER), name)
    return released if released in RELEASED and not storage.exists(name) else None


def hub_name(released: str) -> str:
    return OWNER + next(name for name, size in OTHER_NAMES.items() if size == released)


def directory_of(released: str) -> str:
    return f'gs://gpt-2/models/{released}'


def is_directory(directory: str | None) -> bool:
    """Return whether this is the directory of a released model."""
    return directory in [*map(directory_of, RELEASED)]
