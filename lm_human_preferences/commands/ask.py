"""Command `ask`: add questions about samples of one or two policies, or texts of a file."""

import os
from typing import Any

import click

from lm_human_preferences import label_types, lm_tasks, storage
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.commands.sampler import Source, warnings_only
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.command_options import AskHParams
from lm_human_preferences.hparams.policy_options import Experiments
from lm_human_preferences.hparams.reward_options import CommandHParams as HParams
from lm_human_preferences.labels.folder import (
    EVERYBODY,
    GOLD,
    TRAIN,
    VALIDATION,
    LabelFolder,
    QuestionWriter,
    is_folder,
)
from lm_human_preferences.labels.task_file import TIES, check_same_task, new_task, read_task
from lm_human_preferences.labels.texts import into_folder, records, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.machine import precision
from lm_human_preferences.online.questions import (
    IDLE_BATCHES,
    Queries,
    QuestionSampler,
    are_equal,
    label_command,
)
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs.run_files import ANSWERS, QUESTIONS, TASK
from lm_human_preferences.runs.run_settings import load_run_hparams, pins
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import progress

INITIAL = 'initial'  # value of --policy or --against for the experiment's initial model
PARTS = {TRAIN: 'train', VALIDATION: 'test'}  # {kind of question: split that its query is from}
# Options of a task that may have other values in a policy's run than for the questions.
MAY_DIFFER = ('query_dataset', 'policy', 'penalty_reward_value')


def ask(
    reward_hparams: HParams,
    experiment: str,
    experiments: Experiments,
    folder: str,
    options: AskHParams,
) -> None:
    """Add questions to a folder; create the folder if it does not exist."""
    task, policy, against = reward_hparams.task, options.policy, options.against
    check_folder(folder)
    _check_options(reward_hparams, options)
    if INITIAL in (policy, against):
        reward_hparams.override_from_dict(pins(reward_hparams))
    text = options.instructions
    record = task_record(reward_hparams, folder, experiment, instructions=text, ties=options.ties)
    if options.questions is not None or options.gold is not None:
        _ask_given(reward_hparams, folder, record, options, experiments)
        return
    kind = TRAIN if against is None else VALIDATION
    with warnings_only():
        policies = {_shown(options): _load_policy(policy, task, options)}
        if against is not None:
            policies[_resolved(against)] = _load_policy(against, task)
    encoding = _one_encoding(policies)
    sizes = [each.trained_model.sizes() for each in policies.values()]
    lm_tasks.check_task(task, encoding, min(sizes, key=lambda each: each.n_ctx))
    precision.configure_for(max(size.n_embd for size in sizes), 'fp32')
    for note in lm_tasks.query_notes(task, encoding.get_encoder(), PARTS[kind]):
        click.echo(note)
    with QuestionWriter(folder, record, encoding) as writer:
        at_once = max(1, options.batch_size // options.best_of)
        sampler = QuestionSampler(policies, task, writer.folder.label_type, at_once)
        source = reward_hparams.labels.source
        queries = Queries(task, encoding.get_encoder(), PARTS[kind], source)
        there = [each for each in writer.folder.questions.values() if each.part == PARTS[kind]]
        queries.seek(there[-1].texts_read if there else 0)
        set_seed(options.seed + len(writer.folder.questions))
        added = _ask_sampled(writer, sampler, queries, kind, options)
    _report(writer.folder, experiments, added, sampler.equal, sampler.known)
    if added < options.count:
        click.echo(
            f'WARNING: only {added} of {options.count} questions were found:'
            f' {IDLE_BATCHES} batches had nothing new',
            err=True,
        )


def _ask_given(
    settings: HParams,
    folder: str,
    record: dict[str, Any],
    options: AskHParams,
    experiments: Experiments,
) -> None:
    gold = options.gold
    path = options.questions if gold is None else gold
    assert path is not None
    encoding = lm_tasks.initial_encoding(settings.task.policy.initial_model)
    with about_option('--questions' if gold is None else '--gold'):
        given, notes = tokenise.tokenise(
            records.read(path),
            settings,
            encoding,
            needs_answer=gold is not None,
            ties=bool(record.get(TIES)),
        )
    fields = label_types.get(settings.labels.type).samples
    new = [label for label in given if not are_equal([label.tokens[name] for name in fields])]
    with QuestionWriter(folder, record, encoding) as writer:
        new = into_folder.as_asked(new, writer.folder)
        kind, source = (TRAIN, os.path.basename(path)) if gold is None else (GOLD, GOLD)
        there = writer.folder.count(TRAIN)

        def labellers(number: int) -> int:
            return _labellers(options, there + number) if gold is None else EVERYBODY

        added = into_folder.add_questions(new, writer, source, kind=kind, labellers=labellers)
    _report(writer.folder, experiments, added, equal=len(given) - len(new), known=len(new) - added)
    for note in notes:
        click.echo(note)


def task_record(
    settings: HParams,
    folder: str,
    experiment: str,
    instructions: str | None = None,
    ties: bool = False,
) -> dict[str, Any]:
    """Return the content for a folder's task.json; UserError if the folder has another task."""
    text = None
    if instructions is not None:
        with about_option('--instructions'):
            text = storage.read_text(instructions).strip()
    if ties and not label_types.get(settings.labels.type).can_tie:
        raise UserError(
            f'--ties on: labels of the type {settings.labels.type} have no ties; give --labels.type'
            ' best_of_2 or best_of_4'
        )
    record = new_task(settings.labels.type, settings.task.to_nested_dict(), text, ties, experiment)
    if is_folder(folder):
        there = read_task(folder)
        check_same_task(folder, there, record)
        if text is not None and there['instructions'] != text:
            raise UserError(
                f'--instructions {instructions}: {folder} already gives people other'
                ' instructions; use another folder'
            )
        if there.get(TIES):
            record[TIES] = True
    return record


def _report(
    folder: LabelFolder, experiments: Experiments, added: int, equal: int, known: int
) -> None:
    total, of_training = len(folder.questions), folder.count(TRAIN)
    click.echo(f'{folder.path}: {added} questions added, {total} in all')
    if total:
        click.echo(f'To answer them: {label_command(folder.path)}')
    if of_training:
        command = training_command(folder, experiments, of_training)
        click.echo(f'To train on the answers: {command}')
    if equal:
        click.echo(f'{equal} questions whose samples are all equal were not asked')
    if known:
        click.echo(f'{known} questions that are there already were not asked again')


def check_folder(folder: str) -> None:
    """Raise UserError unless `folder` is a folder of labels, or can become one."""
    if storage.is_remote(folder):
        raise UserError(f'FOLDER {folder} is remote; give a local directory')
    if os.path.isdir(folder) and not is_folder(folder):
        # An `ask` that was killed before it wrote task.json may have left these files.
        own = (ANSWERS, QUESTIONS, TASK)
        if not all(name.startswith(own) for name in os.listdir(folder)):
            raise UserError(f'{folder} is neither empty nor a folder of labels: use another folder')


def _check_options(settings: HParams, options: AskHParams) -> None:
    policy, against = options.policy, options.against
    if against is not None and _resolved(against) == _shown(options):
        raise UserError(f'--against {against} equals --policy {policy}: name another policy')
    samples = len(label_types.get(settings.labels.type).samples)
    if against is not None and samples % 2:
        raise UserError(
            f'--against {against}: --labels.type {settings.labels.type} shows {samples} sample(s),'
            ' which two policies cannot share equally'
        )


def _resolved(name: str) -> str:
    """Return a policy's name, or the real path of a local policy, so that names can be compared."""
    if name == INITIAL or storage.is_remote(name):
        return name.rstrip('/')
    return os.path.realpath(name)


def _shown(options: AskHParams) -> str:
    """Return the name that a folder records for --policy, such as 'best of 4 of RUN by JUDGE'."""
    policy = _resolved(options.policy)
    if options.best_of == 1:
        return policy
    by_judge = '' if options.judge is None else f' by {options.judge}'
    return f'best of {options.best_of} of {policy}{by_judge}'


def _load_policy(
    name: str, task: lm_tasks.TaskHParams, options: AskHParams | None = None
) -> Policy:
    """Load a policy, which returns the best of several responses if `options` ask for it."""
    if name == INITIAL:
        source = Source.of_task(task)
    else:
        _check_task_of_run(name, task)
        source = Source.of_run(name, 'policy')
    if options is None or options.best_of == 1:
        return source.policy()
    reward = source.reward(options.judge, options.rewards.function)
    return source.policy(best_of=options.best_of, reward=reward)


def _check_task_of_run(name: str, task: lm_tasks.TaskHParams) -> None:
    """Raise UserError unless the run `name` was trained on `task`, the task of the questions."""
    with about_option('--policy or --against'):
        run_task = load_run_hparams(name).task
    there = run_task.to_nested_dict()
    for key, value in task.to_nested_dict().items():
        if key not in MAY_DIFFER and there[key] != value:
            raise UserError(
                f'the run {name} was trained on another task: its --task.{key} is {there[key]!r},'
                f' not {value!r}'
            )


def _one_encoding(policies: dict[str, Policy]) -> Encoding:
    first, *others = [policy.trained_model.encoding for policy in policies.values()]
    if others and others[0].name != first.name:
        raise UserError(
            f'the policies {" and ".join(policies)} cannot be compared, as their encodings differ:'
            f' {first.name!r} and {others[0].name!r}'
        )
    return first


def _labellers(options: AskHParams, number: int) -> int:
    """Return how many labellers should answer training question `number`, counted from 0."""
    is_for_several = int((number + 1) * options.repeated) > int(number * options.repeated)
    return options.labellers if is_for_several else 1


def _ask_sampled(
    writer: QuestionWriter,
    sampler: QuestionSampler,
    queries: Queries,
    kind: str,
    options: AskHParams,
) -> int:
    """Sample and add questions until enough are added or no new ones appear; return how many."""
    count = options.count
    weights = {name: policy.digest() for name, policy in sampler.policies.items()}
    header = {
        'kind': kind,
        'policies': sampler.names,
        'weights': [weights[name] for name in sampler.names],
        'part': PARTS[kind],
    }
    added = idle = 0
    with progress(total=count, comm=Comm(), desc='asking', unit='question') as bar:
        while added < count and idle < IDLE_BATCHES:
            batch = queries.take(min(options.batch_size, count - added))
            seen = set(writer.folder.questions)
            there = writer.folder.count(kind)
            questions, headers = [], []
            for query, tokens in sampler.new_questions(batch, seen):
                people = _labellers(options, there + len(questions))
                headers.append({**header, 'labellers': people, 'texts_read': query.texts_read})
                questions.append(tokens)
            writer.add(questions, headers)
            added += len(questions)
            bar.update(len(questions))
            idle = 0 if questions else idle + 1
    return added
