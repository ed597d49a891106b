"""Model card of an exported model, README.md: facts about its run, without names and texts."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lm_human_preferences import storage
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.report import facts, label_facts
from lm_human_preferences.report.foreign_text import environment, shortened
from lm_human_preferences.report.run import Run
from lm_human_preferences.report.words import NOT_MEASURED, NOT_RECORDED, facts_table
from lm_human_preferences.runs import run_record
from lm_human_preferences.utils.terminal import printable

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
    ends: Sequence[int] = ()  # tokens at which a policy stops
    constant: float = 0.0  # part of a reward that the score lacks
    members: int = 1  # reward models of its ensemble
    # Of a head on frozen hidden states: its 'file', its 'blocks', whether it is of a 'chat', the
    # Python of the 'content' before a response, the folder with the tokeniser of 'responses', the
    # tokens that are 'ends' of responses, and their 'length'
    head: Mapping[str, Any] | None = None


def card(run: Run | None, model_dir: str, use: Use) -> str:
    """Return the card of a policy, or of a reward model. run: None for a model of no run."""
    from huggingface_hub import ModelCard, ModelCardData  # here, as it takes a second to import

    task, template = None if run is None else run.task, environment(escaped)
    body = template.get_template('model_card.md').render(
        **_facts(run, model_dir),
        versions=facts_table(run_record.versions()),
        query=Markup(_query(task)),
        task=task,
        has_run=run is not None,
        joined=JOINED if use.is_joined else '',
        **vars(use),
    )
    model = model_dir if task is None else task.policy.initial_model
    tags = ['rlhf', 'ppo' if use.has_policy else 'reward-model']
    data = ModelCardData(
        library_name='peft' if use.is_adapter else 'transformers',
        pipeline_tag='text-generation' if use.has_policy else 'text-classification',
        tags=[*(tags if run or not use.has_policy else []), 'lm-human-preferences'],
        base_model=hub_name(model),
    )
    whole = '---\n{{ card_data }}\n---\n\n{{ body }}'
    return str(ModelCard.from_template(data, template_str=whole, body=body))


def _facts(run: Run | None, model_dir: str) -> dict[str, Any]:
    """Return the facts of a run that the template shows, by their names in it."""
    if run is None:
        return {
            'name': model_dir,
            'mind': [],
            'what': facts_table({'Its training': NOT_RECORDED}),
            'sure': facts_table({'What it does': NOT_MEASURED}),
        }
    return {
        'name': os.path.basename(os.path.abspath(run.directory)),
        'mind': facts.mind(run),
        'what': facts.task(run),
        'learned': label_facts.counts(run),
        'gain': facts.gain(run),
        'sure': facts.sure(run),
    }


def hub_name(model: str) -> str | None:
    """Return the name of a model on the hub; None for one that is not of the hub."""
    name = released.released_name(model)
    if name is not None:
        return released.hub_name(name)
    path = storage.model_path(model)
    return None if path is None else path.removeprefix(storage.HUB).partition('@')[0]


def _query(task: TaskHParams | None) -> str:
    """Return the Python of a query, as the policy sees it."""
    if task is not None and task.chat:
        return "[{'role': 'user', 'content': 'A question'}]"
    text = 'The beginning of a text'
    return repr(text if task is None else f'{task.query_prefix}{text}{task.query_suffix}')


def write(card: str, directory: str) -> None:
    storage.write_bytes(os.path.join(directory, FILE), card.encode(errors='replace'))


def escaped(text: object) -> Markup:
    """Escape Markdown in untrusted text, in one line."""
    return Markup(_MARKS.sub(r'\\\1', printable(re.sub(r'\s+', ' ', shortened(str(text))))))
