"""The page of an exported model: README.md, as the hub shows it.

It says what the run's files say, and what they do not. No labeller's name is in it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

from lm_human_preferences import __version__, storage
from lm_human_preferences.run_story import commands, sentences
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.run_story.facts import RunFacts, hub_name
from lm_human_preferences.run_story.markdown import bullets, code_block, escaped, paragraph

FILE = 'README.md'
_UNSAID = """\
# The licence and the languages are not known to the program that wrote this. Add them:
# license: ...
# language: ..."""
_USE_POLICY = """\
from transformers import pipeline

generate = pipeline('text-generation', model='ORG/NAME')
generate(%s, max_new_tokens=24)"""
_TEXT, _MESSAGES = "'The beginning of a text'", "[{'role': 'user', 'content': 'A question'}]"
_USE_REWARD = """\
from transformers import pipeline

reward = pipeline('text-classification', model='ORG/NAME')
reward(['A query. And a response.'])"""
_NO_TOKENISER = (
    'AutoModelForCausalLM.from_pretrained loads it. There is no tokeniser: its encoding is one that'
    ' only the program has, for its tests.'
)
_PADDED = (
    'A reward is read at the last token that is not padding. Pad on the right, with the padding'
    " token of this tokeniser: transformers' GPT-2, padded on the left, gives wrong scores unless"
    ' it is passed position_ids.'
)
_NO_SIGMOID = (
    "The score is the reward itself. transformers' pipeline puts a sigmoid on a single score by"
    " default; problem_type 'regression' in config.json keeps it from that. Code of your own that"
    ' applies a sigmoid changes the scale, not the order.'
)
_ONE_TEXT = (
    'Query and response are one text here. The training encoded them one by one: the tokens are'
    ' the same if the response begins with a space or a new line, else they can differ. The reward'
    ' model was trained without the prefix and suffix that the policy sees.'
)
OTHER_TOKENS = (
    'AutoTokenizer makes other tokens of texts than the training did, as it has rules of its own'
    ' for this family. Load the tokeniser by PreTrainedTokenizerFast.from_pretrained, and give it'
    ' to the pipeline as its tokenizer.'
)
_DIALOGUES = (
    'A dialogue is read as text, without the chat template that the policy sees: "user: " and the'
    ' content, an empty line, "assistant: " and the content, and so on. A message without others is'
    ' its content alone. The response follows the query at once.'
)


def policy_card(
    facts: RunFacts | None, experiments: Experiments, model_dir: str, *, has_tokeniser: bool
) -> str:
    """The page of a policy. facts: None for a language model that belongs to no run.

    model_dir: that was exported. has_tokeniser: whether one was written beside it.
    """
    base = facts.base_model if facts is not None else hub_name(model_dir)
    parts = [_metadata(base, 'text-generation', ['rlhf', 'ppo'] if facts else [])]
    if facts is None:
        parts += ['# A language model', 'It was saved by lm-human-preferences as it was found.']
    else:
        parts += [
            f'# {escaped(_name(facts))}: a policy trained from preferences',
            paragraph(
                [
                    'A language model that was trained by PPO to write what a reward model likes,'
                    f' as in {sentences.PAPER}.',
                    *sentences.beginning(facts),
                    *sentences.task(facts),
                ]
            ),
        ]
    parts.append('## Use')
    if not has_tokeniser:
        parts.append(_NO_TOKENISER)
    else:
        query = _MESSAGES if _is_chat(facts) else _TEXT
        parts.append(code_block([_USE_POLICY % query], 'python'))
    if facts is not None:
        parts += ['## Training', bullets(_policy_training(facts))]
        parts += _about_reward(facts)
        parts += _evaluation(facts)
    return _page(parts, facts, experiments, has_policy=True)


def reward_card(
    facts: RunFacts | None,
    experiments: Experiments,
    constant: float,
    *,
    has_auto_tokeniser: bool = True,
    members: int = 1,
) -> str:
    """The page of a reward model.

    constant: what the classifier's score lacks. has_auto_tokeniser: whether AutoTokenizer makes the
    tokens of the training. members: how many there are in its ensemble.
    """
    base = facts.base_model if facts is not None else None
    parts = [_metadata(base, 'text-classification', ['rlhf', 'reward-model'])]
    name = 'A reward model' if facts is None else f'{escaped(_name(facts))}: a reward model'
    parts += [
        f'# {name}',
        paragraph(
            [
                'A language model with a head that gives a text one number: how much the labellers'
                f' of its training would like it, as in {sentences.PAPER}.',
                *sentences.one_of(members),
                *([] if facts is None else [*sentences.beginning(facts), *sentences.task(facts)]),
            ]
        ),
        '## Use',
        code_block([_USE_REWARD], 'python'),
        bullets([_constant(constant), _PADDED, _NO_SIGMOID, *_how_text_is_read(facts)]),
        *([] if has_auto_tokeniser else [bullets([OTHER_TOKENS])]),
    ]
    if facts is not None:
        parts += ['## Training', bullets(_reward_training(facts))]
    return _page(parts, facts, experiments, has_policy=False)


def _policy_training(facts: RunFacts) -> list[str]:
    found = sentences.policy_training(facts) + sentences.comparisons(facts)
    return found or ['How it was trained is not known.']


def _metadata(base_model: str | None, task: str, tags: Sequence[str]) -> str:
    """What the hub reads: YAML between dashes."""
    lines = ['---', 'library_name: transformers', f'pipeline_tag: {task}', 'tags:']
    lines += [f'- {tag}' for tag in [*tags, 'lm-human-preferences']]
    if base_model is not None:
        lines.append(f"base_model: '{base_model}'")
    return '\n'.join([*lines, _UNSAID, '---'])


def _name(facts: RunFacts) -> str:
    return os.path.basename(os.path.abspath(facts.directory))


def _is_chat(facts: RunFacts | None) -> bool:
    return facts is not None and facts.task is not None and facts.task.chat


def _how_text_is_read(facts: RunFacts | None) -> list[str]:
    return [_ONE_TEXT, _DIALOGUES] if _is_chat(facts) else [_ONE_TEXT]


def _constant(constant: float) -> str:
    if constant == 0:
        return 'The scores are those of the training: its scale is part of the weights.'
    return (
        f'Add {constant!r} to each score, which config.json has as reward_constant: the network has'
        ' no bias that could hold it. Without it all rewards are off by that number, and no ranking'
        ' changes.'
    )


def _reward_training(facts: RunFacts) -> list[str]:
    found = sentences.labels(facts.labels)
    hparams = facts.reward
    if hparams is not None:
        epochs = 'once' if hparams.epochs == 1 else f'{hparams.epochs} times'
        found.append(
            f'It learned each label {epochs}, {hparams.batch_size} at a time, at a learning rate of'
            f' {hparams.lr:g} that fell to 0.'
        )
        if hparams.normalize_after:
            found.append(
                'Then its scale was set such that responses of the initial model have a mean'
                ' reward of 0 with a standard deviation of 1, or that of the labels if they are'
                ' numbers.'
            )
    found += sentences.held_out(facts)
    return found or ['How it was trained is not known.']


def _about_reward(facts: RunFacts) -> Iterator[str]:
    """The reward of a policy, which another run may have trained."""
    yield '### The reward'
    trainer = facts.reward_trainer
    found = sentences.reward(facts) + sentences.labels(trainer.labels)
    found += sentences.held_out(trainer)
    yield bullets(found or ['What the reward was is not known.'])


def _evaluation(facts: RunFacts) -> Iterator[str]:
    if facts.evaluation is None:
        return
    table = sentences.evaluated(facts.evaluation)
    yield '## Evaluation'
    if table is None:
        yield 'The results of its evaluation are damaged.'
        return
    yield code_block(table)
    yield bullets(sentences.EVALUATION)


def _page(
    parts: list[str], facts: RunFacts | None, experiments: Experiments, *, has_policy: bool
) -> str:
    """The page with what all pages end with."""
    if facts is not None:
        parts += _commands(facts, experiments)
    parts += ['## What is not known', bullets(sentences.not_known(facts, has_policy=has_policy))]
    parts += ['## Versions', f'Exported by {_versions()}.']
    return '\n\n'.join(parts) + '\n'


def _commands(facts: RunFacts, experiments: Experiments) -> Iterator[str]:
    """The command that repeats the run."""
    yield '## Do it again'
    hparams = facts.policy if facts.policy is not None else facts.reward
    if hparams is None:
        yield 'The settings of the run are not known.'
        return
    command = hparams.writes()[-1]
    experiment = facts.experiments.get(command)
    line = None
    if experiment is not None:
        line = commands.repeating(
            command, hparams, _name(facts), experiment, facts.ranks, experiments
        )
    if line is None:
        yield 'The run does not say which experiment it was of, so its command is not known.'
        return
    yield code_block([line], 'sh')
    yield (
        'All other settings are those of the experiment. Of local files only the last part of the'
        ' path is told. Results are the same to the digit only with the same number of ranks on the'
        ' same kind of machine.'
    )


def _versions() -> str:
    import torch
    import transformers

    return (
        f'lm-human-preferences {__version__}, PyTorch {torch.__version__}, transformers'
        f' {transformers.__version__} and Python {platform.python_version()}'
    )


def write(card: str, directory: str) -> None:
    """Write a page to the directory of an exported model, a local one."""
    storage.write_bytes(os.path.join(directory, FILE), card.encode())
