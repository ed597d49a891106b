"""GPT-2 as OpenAI released it: names, sizes and places of the models, and some of its tokens."""

from lm_human_preferences import storage

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
# {OpenAI's first name for a model, from a wrong parameter count: name in RELEASED}
FIRST_NAMES = {'117M': '124M', '345M': '355M'}
OWNER = 'openai-community/'
# {id of a token at which experiments end responses: its text}
TEXTS_OF_TOKENS = {13: '.', 198: '\n'}


def released_name(name: str) -> str | None:
    """Return the model's name in RELEASED; None for other models, and if `name` is a directory."""
    released = FIRST_NAMES.get(name) or OTHER_NAMES.get(name.removeprefix(OWNER), name)
    return released if released in RELEASED and not storage.exists(name) else None


def hub_name(released: str) -> str:
    return OWNER + next(name for name, size in OTHER_NAMES.items() if size == released)


def directory_of(released: str) -> str:
    return f'gs://gpt-2/models/{released}'


def is_directory(directory: str | None) -> bool:
    """Return whether this is the directory of a released model."""
    return directory in [*map(directory_of, RELEASED)]
