"""Which files of a run directory each command writes: what is deleted, resumed and uploaded."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

from lm_human_preferences.checkpointing import names

LOCK = 'lock'  # names the process that writes the run now
UNFINISHED = 'unfinished'  # in reward_model/: checkpoints of one that is being trained
RESULTS = 'evaluation.json'  # of `evaluate` with default settings
REPORT = 'report.html'
# Files of `evaluate` and `report`: uploaded, but not deleted with a run.
EVALUATION = r'evaluation(-[a-z0-9_.-]+)?\.(json|png)|report\.html'
SAMPLES = 'samples.jsonl'  # what a policy has answered on the way
LABELS = 'labels'  # folder of those that are collected while a policy trains
# In every folder of labels, see labels/folder.py
TASK, QUESTIONS, ANSWERS, USED = 'task.json', 'questions.jsonl', 'answers', 'used.jsonl'
LABELLER = re.compile(r'[A-Za-z0-9_-]{1,32}')  # by whose name a file in `answers` is called
# Ends the names of what belongs to a member of an ensemble of reward models, but for the first.
_MEMBER = r'(?:_[1-9]\d*)?'
LEARNED = 'reward_model/labels.json'  # says which labels it learned from
# Of a run whose reward is a function of the user's, see runs/reward_function.py
FUNCTION, FUNCTION_RECORD = 'reward_function.py', 'reward_function.json'
# What belongs to a tokeniser: copied beside a model that is saved with it, where it exists.
TOKENISER, TOKENISER_SETTINGS = 'tokenizer.json', 'tokenizer_config.json'
CHAT_TEMPLATE = 'chat_template.jinja'
TOKENISER_FILES = (
    TOKENISER,
    TOKENISER_SETTINGS,
    'special_tokens_map.json',
    CHAT_TEMPLATE,
    'generation_config.json',
)
_ANSWERS = rf'{ANSWERS}/({LABELLER.pattern})\.jsonl'
_TOKENISER = '|'.join(map(re.escape, TOKENISER_FILES))
_LABEL_FILES = rf'({"|".join(map(re.escape, (TASK, QUESTIONS, USED)))}|{_ANSWERS}|{_TOKENISER})'
# Beside the weights of a network: its sizes, transformers' config of it, and its encoding with the
# files of a tokeniser.
_MODEL_FILES = rf'hparams\.json|config\.json|encoding|{_TOKENISER}'
_EVENTS = r'events\.out\.tfevents\..*'


@dataclasses.dataclass(frozen=True)
class CommandFiles:
    """The files that one training command writes; directories are relative to SAVE_DIR.

    network: of the network that it trains. events: of TensorBoard's files. finished: of the
    checkpoints that other commands read. unfinished: of those to resume from; the same directory
    for a policy. more: a regular expression for other files, if there are any. has_members: whether
    it may train an ensemble.
    """

    command: str
    network: str
    events: str
    finished: str
    unfinished: str
    more: str = ''
    has_members: bool = False

    @property
    def settings(self) -> str:
        """The name of the JSON file with the command's options, as the original wrote it."""
        return f'{self.command}_hparams.json'

    @property
    def more_settings(self) -> str:
        """The name of the JSON file with the options that the original does not have."""
        return f'{self.command}_more_hparams.json'

    @property
    def commands(self) -> str:
        """The name of the file that says which commands have worked on this."""
        return f'{self.command}_commands.jsonl'

    def pattern(self) -> str:
        """A regular expression for all of its files."""
        member = _MEMBER if self.has_members else ''
        network = f'{self.network}{member}'
        files = [*map(re.escape, (self.settings, self.more_settings, self.commands))]
        files.append(f'{network}/({_MODEL_FILES})')
        files.append(f'{self.events}{member}/{_EVENTS}')
        for directory in dict.fromkeys((self.finished, self.unfinished)):  # each once
            files.append(f'{network}{directory.removeprefix(self.network)}/{names.ANY_FILE}')
        return '|'.join(filter(None, [*files, self.more]))

    def of_member(self, number: int) -> CommandFiles:
        """Those of the member of an ensemble that has this number, from 0."""
        network = member_name(self.network, number)
        return dataclasses.replace(
            self,
            network=network,
            events=member_name(self.events, number),
            finished=network + self.finished.removeprefix(self.network),
            unfinished=network + self.unfinished.removeprefix(self.network),
        )


def member_name(name: str, number: int) -> str:
    """What belongs to the member of an ensemble that has this number, if the first has `name`."""
    return f'{name}_{number}' if number else name


REWARD = CommandFiles(
    'train_reward',
    network='reward_model',
    events='tb/reward_model',
    finished='reward_model/checkpoints',
    unfinished=f'reward_model/{UNFINISHED}',
    more=re.escape(LEARNED),
    has_members=True,
)
POLICY = CommandFiles(
    'train_policy',
    network='policy',
    events='tb/ppo',
    finished='policy/checkpoints',
    unfinished='policy/checkpoints',
    more='|'.join(
        [f'{LABELS}/{_LABEL_FILES}', *map(re.escape, (SAMPLES, FUNCTION, FUNCTION_RECORD))]
    ),
)
COMMANDS = {files.command: files for files in (REWARD, POLICY)}


def is_network(name: str) -> bool:
    """Whether a directory of a run that has this name holds a network that a command trains."""
    own = any(name == files.network for files in COMMANDS.values())
    return own or re.fullmatch(f'{REWARD.network}{_MEMBER}', name) is not None


def written_by(commands: Iterable[str], more: str = '') -> re.Pattern[str]:
    """A regular expression for the files of these commands, each followed by `more`."""
    patterns = [COMMANDS[command].pattern() for command in commands]
    return re.compile(rf'({"|".join(patterns)}){more}')


def uploaded_by(commands: Iterable[str]) -> re.Pattern[str]:
    """A regular expression for what is uploaded while these commands run."""
    return re.compile(f'{written_by(commands).pattern}|{EVALUATION}')


def labeller_of(path: str) -> str | None:
    """The labeller whose answers are in the file `path` of a run; None if it is another file."""
    match = re.search(f'/{LABELS}/{_ANSWERS}$', path)
    return match[1] if match else None


def has_reward_model(directory: str, member: int = 0) -> bool:
    """Whether the run in a local directory has a finished reward model, or that member of it."""
    return os.path.exists(os.path.join(directory, REWARD.of_member(member).finished, names.LIST))


def has_reward_function(directory: str) -> bool:
    """Whether the run in a local directory learns from a function of the user's."""
    return os.path.exists(os.path.join(directory, FUNCTION_RECORD))
