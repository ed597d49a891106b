"""Model card of an exported model, README.md: facts about its run, without names and texts."""

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


def card(
    run: Run | None,
    model_dir: str,
    *,
    has_policy: bool,
    has_tokenizer: bool = True,
    is_joined: bool = False,
    ends: Sequence[int] = (),
    constant: float = 0.0,
    members: int = 1,
    is_adapter: bool = False,
    head: Mapping[str, Any] | None = None,
) -> str:
    """Return the card of a policy, or of a reward model. run: None for a model of no run.

    ends: tokens at which a policy stops. constant: part of a reward that the score lacks. members:
    reward models of its ensemble. head: of one on frozen hidden states, its 'file', its 'blocks',
    whether it is of a 'chat', and the Python of the 'content' before a response.
    """
    from huggingface_hub import ModelCard, ModelCardData  # here, as it takes a second to import

    task = None if run is None else run.task
    body = (
        environment(escaped)
        .get_template('model_card.md')
        .render(
            **_facts(run, model_dir),
            versions=facts_table(run_record.versions()),
            query=Markup(_query(task)),
            task=task,
            has_run=run is not None,
            has_policy=has_policy,
            has_tokenizer=has_tokenizer,
            joined=JOINED if is_joined else '',
            ends=ends,
            constant=constant,
            members=members,
            is_adapter=is_adapter,
            head=head,
        )
    )
    model = model_dir if task is None else task.policy.initial_model
    tags = ['rlhf', 'ppo' if has_policy else 'reward-model'] if run or not has_policy else []
    data = ModelCardData(
        library_name='peft' if is_adapter else 'transformers',
        pipeline_tag='text-generation' if has_policy else 'text-classification',
        tags=[*tags, 'lm-human-preferences'],
        base_model=hub_name(model),
    )
    template = '---\n{{ card_data }}\n---\n\n{{ body }}'
    return str(ModelCard.from_template(data, template_str=template, body=body))


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
    try:
        path = storage.model_path(model)
    except storage.StorageError:
        return None
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
