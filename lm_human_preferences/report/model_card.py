"""Model card (README.md) of an exported model: facts about its run, without labels and samples."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lm_human_preferences import storage
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.report import facts, origin
from lm_human_preferences.report.facts import Table, facts_table
from lm_human_preferences.report.run import Run
from lm_human_preferences.report.texts import (
    NOT_MEASURED,
    NOT_RECORDED,
    environment,
    shortened,
)
from lm_human_preferences.runs import run_record
from lm_human_preferences.utils.streams import printable

FILE = 'README.md'
JOINED = (
    'Prefix, query and suffix are one text here. The training encoded them one by one, and some'
    ' tokens differ, as where a prefix ends with a space.'
)
_MARKS = re.compile(r'([\\`*_\[\]<>&|#~$])')


@dataclasses.dataclass(frozen=True)
class Use:
    """Facts about the use of an exported model."""

    has_policy: bool  # otherwise it is a reward model
    is_adapter: bool = False
    has_tokenizer: bool = True
    is_joined: bool = False  # whether tokens differ, see JOINED
    ends: Sequence[int] = ()  # tokens that end a response of a policy
    constant: float = 0.0  # to be added to each score, as the exported model does not add it
    # For a head on frozen hidden states: its 'file', its 'blocks', whether it reads a 'chat', code
    # of the 'content' before a response, the folder with the tokeniser of 'responses', the tokens
    # that are 'ends' of responses, and the 'length' of responses
    head: Mapping[str, Any] | None = None


def card(run: Run | None, model_dir: str, use: Use) -> str:
    """Return the card of a model. run: None for a model that does not belong to a run."""
    from huggingface_hub import ModelCard, ModelCardData  # here, as it takes a second to import

    name, task, mind = model_dir, None, []
    what = facts_table({'Its training': NOT_RECORDED})
    sections = {'What is not known': facts_table({'What it does': NOT_MEASURED})}
    if run is not None:
        name, task = os.path.basename(os.path.abspath(run.directory)), run.task
        what, mind = facts.task(run), facts.mind(run)
        sections = {
            'What it learned from': origin.counts(run),
            'Results': facts.gain(run) if use.has_policy else Table((), []),
            'What is not known': facts.sure(run),
        }
    sections['Versions'] = facts_table(run_record.versions())
    body = (
        environment(escaped)
        .get_template('model_card.md')
        .render(
            **vars(use),
            name=name,
            task=task,
            mind=mind,
            what=what,
            sections=sections,
            has_run=run is not None,
            query=Markup(_query(task)),
            joined=JOINED if use.is_joined else '',
        )
    )
    tags = ['rlhf', 'ppo' if use.has_policy else 'reward-model']
    data = ModelCardData(
        library_name='peft' if use.is_adapter else 'transformers',
        pipeline_tag='text-generation' if use.has_policy else 'text-classification',
        tags=[*(tags if run or not use.has_policy else []), 'lm-human-preferences'],
        base_model=hub_name(model_dir if task is None else task.policy.initial_model),
    )
    whole = '---\n{{ card_data }}\n---\n\n{{ body }}'
    return str(ModelCard.from_template(data, template_str=whole, body=body))


def hub_name(model: str) -> str | None:
    """Return the name of a model on the hub; None for other models."""
    name = released.released_name(model)
    if name is not None:
        return released.hub_name(name)
    path = storage.model_path(model)
    return None if path is None else path.removeprefix(storage.HUB).partition('@')[0]


def _query(task: TaskHParams | None) -> str:
    """Return Python code for a query as the policy sees it."""
    if task is not None and task.chat:
        return "[{'role': 'user', 'content': 'A question'}]"
    text = 'The beginning of a text'
    return repr(text if task is None else f'{task.query_prefix}{text}{task.query_suffix}')


def write(card: str, directory: str) -> None:
    storage.write_bytes(os.path.join(directory, FILE), card.encode(errors='replace'))


def escaped(text: object) -> Markup:
    """Escape Markdown in untrusted text, in one line."""
    return Markup(_MARKS.sub(r'\\\1', printable(re.sub(r'\s+', ' ', shortened(str(text))))))
