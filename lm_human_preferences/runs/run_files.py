"""Names and patterns of the files that each command writes into a run directory."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

from lm_human_preferences.checkpointing import names

SIZES = 'hparams.json'  # file with a model's dimensions, named as in runs of the original program
RECORD = 'run.json'  # file with the record of a run, see run_record.py
LOCK = 'lock'  # file that names the process that is writing the run
CHECKPOINTS = 'checkpoints'  # folder of checkpoints, inside a network's folder
RESULTS = 'evaluation.json'  # file with the results of `evaluate`
REPORT = 'report.html'
# Files that `evaluate` and `report` write. They are uploaded, but stay when a run is deleted.
EVALUATION = r'evaluation\.(json|png)|report\.html'
SAMPLES = 'samples.jsonl'  # file with responses of the policy during its training
LABELS = 'labels'  # folder of labels that are collected while a policy trains
# Names of the files in every folder of labels, see labels/folder.py
TASK, QUESTIONS, ANSWERS, USED = 'task.json', 'questions.jsonl', 'answers', 'used.jsonl'
LABELLER = re.compile(r'[A-Za-z0-9_-]{1,32}')  # allowed name of a labeller (part of a file's name)
_MEMBER = r'(?:_[1-9]\d*)?'  # suffix of the second and later reward models of an ensemble
FUNCTION = 'reward_function.py'  # file with a copy of the user's reward function
# Names of a tokeniser's files, which are copied beside the weights of a model
TOKENISER, TOKENISER_SETTINGS = 'tokenizer.json', 'tokenizer_config.json'
GENERATION_CONFIG = 'generation_config.json'
TOKENISER_FILES = (
    TOKENISER,
    TOKENISER_SETTINGS,
    'special_tokens_map.json',
    'added_tokens.json',
    'chat_template.jinja',
    GENERATION_CONFIG,
)
_ANSWERS = rf'{ANSWERS}/({LABELLER.pattern})\.jsonl'
_TOKENISER = '|'.join(map(re.escape, TOKENISER_FILES))
_LABEL_FILES = rf'({"|".join(map(re.escape, (TASK, QUESTIONS, USED)))}|{_ANSWERS}|{_TOKENISER})'
ADAPTER = 'adapter.json'  # file with the base model and options of a network saved as adapters
FROZEN_HEAD = 'frozen_head.safetensors'  # file of a reward head on a frozen model
# Pattern for the files that lie beside the weights of a network
_MODEL_FILES = (
    rf'{re.escape(SIZES)}|config\.json|{re.escape(ADAPTER)}|encoding|{_TOKENISER}'
    rf'|{re.escape(FROZEN_HEAD)}'
)


@dataclasses.dataclass(frozen=True)
class CommandFiles:
    """Files that one training command writes; directories are relative to SAVE_DIR."""

    command: str
    network: str
    events: str
    to_resume: str = CHECKPOINTS  # folder of the checkpoints from which a training resumes
    more: str = ''  # pattern for files besides settings, events and networks
    has_members: bool = False  # whether the command may train an ensemble

    @property
    def finished(self) -> str:
        """Return the directory of the checkpoints that other commands read."""
        return f'{self.network}/{CHECKPOINTS}'

    @property
    def unfinished(self) -> str:
        """Return the directory of the checkpoints to resume from."""
        return f'{self.network}/{self.to_resume}'

    @property
    def settings(self) -> str:
        """Return the original's name for the JSON file with the command's options."""
        return f'{self.command}_hparams.json'

    def pattern(self) -> str:
        """Return a regular expression for the paths of all files that this command writes."""
        member = _MEMBER if self.has_members else ''
        network = f'{self.network}{member}'
        files = [re.escape(self.settings), f'{network}/({_MODEL_FILES})']
        files.append(rf'{self.events}{member}/events\.out\.tfevents\..*')
        files.append(f'{network}/({CHECKPOINTS}|{self.to_resume})/{names.ANY_FILE}')
        return '|'.join(filter(None, [*files, self.more]))

    def member_files(self, number: int) -> CommandFiles:
        """Return the files of the ensemble's model `number`, counted from 0."""
        return dataclasses.replace(
            self, network=member_name(self.network, number), events=member_name(self.events, number)
        )


def usual_directory(*names: str) -> str:
    """Return the default folder of all runs, or its subfolder COMMAND or COMMAND/NAME."""
    return os.path.join(os.environ.get('LMHP_SAVE_DIR') or '/tmp/save', *names)


def member_name(name: str, number: int) -> str:
    """Return the name of the ensemble's model `number`; model 0 is called `name`."""
    return f'{name}_{number}' if number else name


REWARD = CommandFiles(
    'train_reward',
    network='reward_model',
    events='tb/reward_model',
    to_resume='unfinished',
    has_members=True,
)
POLICY = CommandFiles(
    'train_policy',
    network='policy',
    events='tb/ppo',
    more='|'.join([f'{LABELS}/{_LABEL_FILES}', *map(re.escape, (SAMPLES, FUNCTION))]),
)
COMMANDS = {files.command: files for files in (REWARD, POLICY)}


def is_network(name: str) -> bool:
    """Return whether `name` is that of a network's directory in a run."""
    return re.fullmatch(f'{POLICY.network}|{REWARD.network}{_MEMBER}', name) is not None


def written_by(commands: Iterable[str], more: str = '') -> re.Pattern[str]:
    """Return a pattern for a path that `commands` write and, after the path, the pattern `more`."""
    patterns = [COMMANDS[command].pattern() for command in commands]
    return re.compile(rf'({"|".join([re.escape(RECORD), *patterns])}){more}')


def uploaded_by(commands: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the files to upload while `commands` run."""
    return re.compile(rf'(?!.*\.part$)({written_by(commands).pattern}|{EVALUATION})')


def is_of_answers(path: str) -> bool:
    """Return whether a run's file at `path` holds the answers of a labeller."""
    return re.search(f'/{LABELS}/{_ANSWERS}$', path) is not None
