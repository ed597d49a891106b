"""Dry run: check those inputs of a training that are on this machine, and show examples."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.datasets import jsonl, registry
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.labels import held_out, training_data
from lm_human_preferences.language import datasets
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.language.trained_models import GPT2
from lm_human_preferences.machine import hardware
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.plan import phases
from lm_human_preferences.plan.phases import (
    Plan,
    Settings,
    TrainPolicy,
    TrainReward,
    make_plan,
)
from lm_human_preferences.reward_sources.texts import joined
from lm_human_preferences.runs import run_dir
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.trainers.additions import session

SHOWN = 200  # maximum number of characters to show of a text
_DEVICES = {'cpu': 'CPU', 'cuda': 'GPU'}


def dry_run(
    settings: Settings, ranks: int, overwrite: bool, explicitly_set: Collection[str]
) -> list[str]:
    """Check whether training could start; return the lines to print. UserError if it could not."""
    phases.check_settings(settings, ranks)
    # `unchecked` lists the options whose files are not on this machine.
    unchecked = run_dir.prepare_run_dir(
        settings, overwrite=overwrite, explicitly_set=explicitly_set, dry_run=True
    )
    settings.override_from_dict(session.pins(settings, ask=False))
    plan = make_plan(settings, ask=False)
    save_dir, device = settings.run.save_dir, _DEVICES[default_device().type]
    lines = [
        f'would start {ranks} rank(s), each on a {device}, {settings.run.precision}',
        f'would write to {save_dir}' if save_dir else 'would save nothing',
        plan.phases_line(),
    ]
    encoding, sizes = _initial_model(plan, unchecked)
    encoder = encoding.get_encoder() if encoding is not None and encoding.is_here else None
    if sizes is not None:
        lines.append(plan.memory_line(sizes, ranks, hardware.free_bytes(ranks)))
    lines += _queries(plan, encoder, unchecked)
    if plan.rewards:
        lines += _labels(plan.rewards[0], encoding, encoder, unchecked)
    elif plan.policy is not None and plan.policy.retraining is None:
        lines += _reward(plan.policy, encoding, unchecked)
    lines += phases.notes(settings)
    if unchecked:
        names = ', '.join(unchecked)
        lines.append(f'not checked, because it is not on this machine: {names}')
    return lines


def _initial_model(plan: Plan, unchecked: list[str]) -> tuple[Encoding | None, Sizes | None]:
    """Return (encoding, sizes) of the initial model; (None, None) if it is not on this machine."""
    task = plan.settings.task
    name = task.policy.initial_model
    known = lm_tasks.known_model(name)
    if known is not None:
        sizes, encoding = known
        create = GPT2(sizes).create
    else:
        if not _is_here(storage.model_path(name) or name):
            unchecked.append(f'--task.policy.initial_model {name}')
            return None, None
        initial_model = lm_tasks.initial_model(name)
        sizes, encoding = initial_model.sizes(), initial_model.encoding
        create = initial_model.create
        is_own = isinstance(initial_model.architecture, GPT2)
        if not (is_own or initial_model.has_weights_here()):
            unchecked.append(f'the weights of --task.policy.initial_model {name}')
        else:
            initial_model.check_runs()
    if encoding.is_here:
        lm_tasks.check_task(task, encoding, sizes)
    else:
        unchecked.append(f'the encoding {encoding.name}, which is needed to check lengths')
    return encoding, phases.sizes_of(plan, sizes, create)


def _queries(plan: Plan, encoder: Encoder | None, unchecked: list[str]) -> list[str]:
    """Check the queries; return lines to print: the first query, and notes about the data set."""
    task = plan.settings.task
    name = task.query_dataset
    if registry.info(name).downloaded or not _is_here(name):
        unchecked.append(f'--task.query_dataset {name}')
        return []
    datasets.get_dataset(name)
    if encoder is None:
        return []
    sampler = lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=1)
    first = encoder.decode(sampler()['tokens'][0])
    notes = phases.check_queries(plan, encoder, with_test=True)
    return [f'first query: {first!r:.{SHOWN}}', *notes]


def _labels(
    phase: TrainReward, encoding: Encoding | None, encoder: Encoder | None, unchecked: list[str]
) -> list[str]:
    """Check the labels; return a line with the first label if labels are read from files."""
    settings = phase.settings
    if settings.labels.are_sampled:
        if encoding is not None:
            known_reward.check_encoding(encoding)
        training_data.check_num_train(settings)
        return []
    if not _is_here(settings.labels.source):
        unchecked.append(settings.labels.setting('source'))
        return []
    if encoding is None or encoder is None:
        return []
    labels = training_data.load_labels(settings, encoding).tensors
    if settings.labels.held_out:
        held_out.split(labels, settings, encoder)
    fields = []
    for field, values in labels.items():
        is_text = values[0].ndim > 0
        value = encoder.decode(values[0]) if is_text else values[0].item()
        fields.append(f'{field} {value!r:.{SHOWN}}')
    return [f'first label: {", ".join(fields)}']


def _reward(policy: TrainPolicy, encoding: Encoding | None, unchecked: list[str]) -> list[str]:
    """Check that the reward can be loaded; return a line with its scores of two texts, if any."""
    elsewhere = policy.source.elsewhere()
    unchecked += elsewhere
    if elsewhere:
        return []
    source = policy.source.pinned(Comm())
    scorer = source.check(encoding)
    if scorer is None:
        return []
    name = policy.settings.task.query_dataset
    queries = [jsonl.Query('', 'A query.', {})] * 2
    if name not in registry.DATASETS and _is_here(name):
        queries = jsonl.read_queries(name)[:2]
    elif not registry.info(name).downloaded:
        made_up = itertools.islice(registry.info(name).load().generator('train'), 2)
        queries = [jsonl.Query('', str(text), {}) for text in made_up]
    texts = [joined(query.text, query.text, query.columns) for query in queries]
    shown = ', '.join(f'{score:.4g}' for score in scorer.score(texts).tolist())
    return [f'{source.name} gives two queries as their own responses {shown}']


def _is_here(path: str) -> bool:
    return not storage.is_remote(path) or storage.is_here(path)
