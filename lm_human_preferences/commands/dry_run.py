"""Dry runs: make the checks of a training (session.py) that need no network; print the outcome."""

import copy
import itertools
from collections.abc import Callable, Collection, Iterable

from lm_human_preferences import (
    lm_tasks,
    plans,
    session,
    storage,
    train_policy,
    train_reward,
)
from lm_human_preferences.datasets import jsonl, registry
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.distributed.engines import expected_engine
from lm_human_preferences.errors import UserError
from lm_human_preferences.external_rewards import classifier
from lm_human_preferences.external_rewards.classifier import Classifier, is_classifier
from lm_human_preferences.external_rewards.function import FunctionScorer
from lm_human_preferences.external_rewards.texts import TextScorer, joined
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.hparams.online_options import OnlineHParams
from lm_human_preferences.hparams.policy_options import RewardHParams
from lm_human_preferences.hparams.reward_options import LabelHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels import held_out, label_files, simulated
from lm_human_preferences.language import datasets
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.network import Network
from lm_human_preferences.language.trained_models import GPT2
from lm_human_preferences.reward_models import locations
from lm_human_preferences.reward_sources import FunctionSource, SavedSource, source_of
from lm_human_preferences.runs import run_dir, run_settings
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.training import memory
from lm_human_preferences.utils.core import default_device


class DryRun:
    """Checks of one training; `unchecked` lists those whose files are not on this machine."""

    def __init__(self, hparams: train_policy.HParams | train_reward.HParams, ranks: int) -> None:
        self.hparams = hparams
        self.ranks = ranks
        self.device = default_device()
        self.unchecked: list[str] = []
        self.query_notes: list[str] = []
        self.estimates: list[memory.MemoryEstimate] = []
        self.policy = hparams.policy
        self.online = None if self.policy is None else self.policy.rewards.online

    def check(self, overwrite: bool, explicitly_set: Collection[str]) -> None:
        """Raise UserError if the training could not start; see `dry_run`."""
        session.check_settings(self.hparams, self.ranks)
        self._check_directory(overwrite, explicitly_set)
        self.hparams.override_from_dict(run_settings.pins(self.hparams, ask=False))
        self._find_members()
        encoding = self._check_model()
        self._check_dataset(self.hparams.task, encoding)
        if self.online is not None:
            self._check_online(self.online, encoding)
        elif self.hparams.reward_training is not None:
            self._check_labels(self.hparams.reward_training, encoding)
        elif self.policy is not None:
            source = source_of(self.policy).pinned(self.policy.run, LocalComm())
            if isinstance(source, FunctionSource) and source.code is not None:
                scorer = FunctionScorer(source.code)
                self._try(scorer)
                if scorer.asks_for_columns and encoding is not None and self.query_notes:
                    # Notes are only made of queries that are here.
                    lm_tasks.query_columns(self.hparams.task, encoding.get_encoder())
            self._check_trained_model(self.policy.rewards, encoding)

    def _check_directory(self, overwrite: bool, explicitly_set: Collection[str]) -> None:
        run = self.hparams.run
        if run.save_dir is None:
            return
        run_dir.check_start(self.hparams, overwrite=overwrite)
        if storage.is_remote(run.save_dir):
            self.unchecked.append(f'--save_dir {run.save_dir}')
            return
        run_dir.check_directory(run.directory)
        run_dir.check_earlier_run(self.hparams, overwrite=overwrite, explicitly_set=explicitly_set)

    def _find_members(self) -> None:
        """Take the number of reward models from the trained ensemble; check that they exist."""
        if self.policy is None or self.policy.new_reward_model is not None:
            return
        name = self.policy.rewards.trained_model
        if name is None or storage.is_remote(name) or not storage.exists(name):
            return
        self.policy.override_from_dict(session.pinned_members(self.policy))
        if self.policy.members > 1 and isinstance(source_of(self.policy), SavedSource):
            locations.locations_of(name, self.policy.members)

    def _check_model(self) -> Encoding | None:
        """Check what needs no download; return the initial model's encoding if it is here."""
        name = self.hparams.task.policy.initial_model
        known = lm_tasks.known_model(name)
        if known is not None:
            sizes, encoding = known
            self._check_sizes(sizes, encoding, GPT2(sizes).create)
            return encoding
        path = storage.model_path(name) or name
        is_in_cache = storage.is_hub(path) and storage.is_here(path)
        if storage.is_remote(path) and not is_in_cache:
            self.unchecked.append(f'--task.policy.initial_model {name}')
            return None
        initial_model = lm_tasks.initial_model(name)
        sizes = initial_model.hparams()
        self._check_sizes(sizes, initial_model.encoding, initial_model.create)
        if initial_model.is_probed and storage.is_hub(path):
            self.unchecked.append(f'the weights of --task.policy.initial_model {name}')
        else:
            initial_model.check()
        return initial_model.encoding

    def _check_sizes(
        self, sizes: Sizes, encoding: Encoding, create: Callable[[Iterable[str]], Network]
    ) -> None:
        """Check that the task suits the initial model; estimate the memory of its networks."""
        if encoding.is_here:
            lm_tasks.check_task(self.hparams.task, encoding, sizes)
        else:
            self.unchecked.append(f'the encoding {encoding.name}, which is needed to check lengths')
        hparams = copy.deepcopy(self.hparams)
        sizes = shared.with_learned(sizes, create, hparams)
        if hparams.policy is not None and _is_elsewhere(hparams.policy.rewards):
            # Whether it is a network of ours is not known: then it takes memory as one of them.
            hparams.policy.rewards.trained_model = 'test'
        for estimate in plans.memory_plans(hparams, sizes, self.ranks):
            memory.check_rows(estimate, self._free_memory())
            self.estimates.append(memory.on_ranks(estimate, self.ranks, self.device))

    def _free_memory(self) -> int:
        if self.device.type == 'cuda':
            return memory.free_on(self.device, LocalComm())
        return memory.on_host() // self.ranks + memory.resident()

    def _check_dataset(self, task: TaskHParams, encoding: Encoding | None) -> None:
        name = task.query_dataset
        is_elsewhere = storage.is_remote(name) and not storage.is_here(name)
        if registry.info(name).downloaded or is_elsewhere:
            self.unchecked.append(f'--task.query_dataset {name}')
            return
        datasets.get_dataset(name)
        if encoding is None or not encoding.is_here:
            return
        encoder = encoding.get_encoder()
        lm_tasks.make_query_sampler(hparams=task, encoder=encoder, batch_size=1)()
        self.query_notes = session.check_queries(self.hparams, encoder)
        if self.policy is not None and self.policy.run.evaluate:
            self.query_notes += lm_tasks.query_notes(task, encoder, 'test')

    def _check_labels(self, hparams: train_reward.HParams, encoding: Encoding | None) -> None:
        elsewhere = _elsewhere(hparams.labels)
        self.unchecked += elsewhere
        if hparams.labels.source == 'mock':
            self._check_known_reward(encoding)
            simulated.check_num_train(hparams)
        elif not elsewhere and encoding is not None and encoding.is_here:
            labels = label_files.load_labels(hparams, encoding)
            held_out.split(labels.tensors, hparams, encoding.get_encoder())

    def _check_online(self, online: OnlineHParams, encoding: Encoding | None) -> None:
        """Check the collecting of labels, which needs no source but may take a source's queries."""
        if online.source == 'mock':
            self._check_known_reward(encoding)
        if registry.info(self.hparams.task.query_dataset).labels_stand_in:
            assert self.hparams.new_reward_model is not None
            self.unchecked += _elsewhere(self.hparams.new_reward_model.labels)

    def _check_known_reward(self, encoding: Encoding | None) -> None:
        if encoding is not None:
            known_reward.check_encoding(encoding)

    def _check_trained_model(self, given: RewardHParams, encoding: Encoding | None) -> None:
        name = given.trained_model
        if name is None:
            return
        if name == 'mock':
            self._check_known_reward(encoding)
        elif _is_elsewhere(given):
            self.unchecked.append(f'--rewards.trained_model {name}')
        elif is_classifier(name):
            classifier.check_directory(name, given.class_name)
            self._try(Classifier(name, given.class_name, chat=self.hparams.task.chat))
        elif storage.is_remote(name) or not storage.exists(name):
            # It may still be in training.
            self.unchecked.append(f'--rewards.trained_model {name}')
        elif name != 'test':
            locations.reward_model_dir(name)

    def _try(self, scorer: TextScorer) -> None:
        """Ask a reward about the first two queries of each file here, as their responses."""
        name = self.hparams.task.query_dataset
        if f'--task.query_dataset {name}' in self.unchecked:
            queries = [jsonl.Query('', 'A query.', {})] * 2
        elif name in registry.DATASETS:
            texts = itertools.islice(registry.info(name).load_generator()('train'), 2)
            queries = [jsonl.Query('', str(text), {}) for text in texts]
        else:
            queries = jsonl.read_queries(name)[:2]
            self._try_on_test_part(scorer, name)
        self._ask(scorer, queries)

    def _try_on_test_part(self, scorer: TextScorer, name: str) -> None:
        file = jsonl.file_of_test_part(name)
        if file is None or self.policy is None or not self.policy.run.evaluate:
            return
        try:
            self._ask(scorer, jsonl.read_queries(file)[:2])
        except UserError as e:
            raise UserError(f'{file}, on which --run.evaluate needs the reward: {e}') from e

    def _ask(self, scorer: TextScorer, queries: Iterable[jsonl.Query]) -> None:
        scorer.score([joined(query.text, query.text, query.columns) for query in queries])

    def lines(self) -> list[str]:
        """Return the lines to print: what would start, where, and what was not checked."""
        run = self.hparams.run
        device = 'GPU' if self.device.type == 'cuda' else 'CPU'
        lines = [f'would start 1 rank on a {device}, {run.precision}']
        if self.ranks > 1:
            engine = expected_engine(run.allreduce)
            lines = [
                f'would start {self.ranks} ranks on {device}s, {run.precision}, averaging gradients'
                f' by {engine}'
            ]
        lines.append(f'would write to {run.save_dir}' if run.save_dir else 'would save nothing')
        lines += self.query_notes
        if self.estimates:
            free = self._free_memory()
            peak = max(estimate.peak() for estimate in self.estimates)
            lines.append(
                f'memory expected: {peak / 1e9:.2f} GB for each rank, which has {free / 1e9:.1f} GB'
            )
            warnings = [memory.warning(estimate, free) for estimate in self.estimates]
            lines += [warning for warning in warnings if warning]
        lines += session.precision_notes(self.hparams)
        if self.unchecked:
            unchecked = ', '.join(self.unchecked)
            lines.append(f'not checked, because it is not on this machine: {unchecked}')
        return lines


def _is_elsewhere(settings: RewardHParams) -> bool:
    """Return whether the reward is a model of the hub that is not downloaded yet."""
    path = storage.model_path(settings.trained_model or '')
    return path is not None and not storage.is_here(path)


def _elsewhere(labels: LabelHParams) -> list[str]:
    return [
        labels.setting(name)
        for name, path in labels.sources().items()
        if storage.is_remote(path) and not storage.is_here(path)
    ]


def dry_run(
    hparams: train_policy.HParams | train_reward.HParams,
    ranks: int,
    overwrite: bool,
    explicitly_set: Collection[str],
) -> list[str]:
    """Check a training; return the lines to print. UserError if it could not start."""
    checks = DryRun(hparams, ranks)
    checks.check(overwrite, explicitly_set)
    return checks.lines()
