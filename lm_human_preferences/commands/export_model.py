"""Writing a trained model as a Hugging Face directory (safetensors), for other tools."""

import os
import shlex
from collections.abc import Sequence

import torch

from lm_human_preferences import rewards, storage
from lm_human_preferences.commands.sample_policy import warnings_only
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import reward_on_labels
from lm_human_preferences.external_rewards.classifier_files import is_classifier
from lm_human_preferences.language import tokenisers, trained_models
from lm_human_preferences.language.exported import classifier, tokeniser
from lm_human_preferences.reward_models import places
from lm_human_preferences.run_story import facts, model_card
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.runs import run_files
from lm_human_preferences.training import precision


def export(model_dir: str, output_dir: str, experiments: Experiments) -> None:
    """Save a model to `output_dir`, as Hugging Face's transformers reads it, with a README.md.

    model_dir: a run, a model directory or a released name. A run of train_policy gives its policy,
    a language model, whose value head is left out: there is no place for it. A reward model becomes
    a sequence classifier with one label; an ensemble a directory with one of each member.
    experiments: see run_story.commands.
    """
    is_empty_folder = os.path.isdir(output_dir) and not os.listdir(output_dir)
    if os.path.exists(output_dir) and not is_empty_folder:
        raise UserError(f'{output_dir} is not empty: give a new directory')
    if is_classifier(model_dir):
        raise UserError(f'{model_dir} is a classifier of transformers already: copy it as it is')
    reward_model = _reward_model_in(model_dir)
    if reward_model is None:
        _export_policy(model_dir, output_dir, experiments)
        directories = [output_dir]
    else:
        directories = _export_reward_models(reward_model, model_dir, output_dir, experiments)
    print(f'Saved {model_dir} to {" and ".join(directories)}')
    if len(directories) > 1:
        print('Each is a model of its own; the reward of the run is the mean of their scores')
    print(f'{model_card.FILE} there says what is known about it; add its licence and its languages')
    print(f'Nothing was uploaded; this would: hf upload ORG/NAME {shlex.quote(directories[0])}')


def _export_policy(model_dir: str, output_dir: str, experiments: Experiments) -> None:
    policy = trained_models.TrainedModel(model_dir)
    policy.to_transformers().save_pretrained(output_dir)
    policy.encoding.write_tokeniser(output_dir)
    names = (tokenisers.TOKENISER, 'vocab.json')
    card = model_card.policy_card(
        facts.of_run(model_dir),
        experiments,
        model_dir,
        has_tokeniser=any(os.path.exists(os.path.join(output_dir, name)) for name in names),
    )
    model_card.write(card, output_dir)


def _export_reward_models(
    saved: trained_models.TrainedModel, model_dir: str, output_dir: str, experiments: Experiments
) -> list[str]:
    """Save a reward model, or each member of an ensemble; returns the directories of them."""
    found = places.places_of(saved.name)
    directories = [output_dir]
    if len(found) > 1:
        names = [run_files.member_name(places.SCOPE, number) for number in range(len(found))]
        directories = [os.path.join(output_dir, name) for name in names]
    has_auto_tokeniser = True
    for place, directory in zip(found, directories, strict=True):
        constant = _export_reward_model(saved, place, directory)
        has_auto_tokeniser = tokeniser.is_read_as_written(saved.encoding, directory)
        card = model_card.reward_card(
            facts.of_run(model_dir),
            experiments,
            constant,
            has_auto_tokeniser=has_auto_tokeniser,
            members=len(found),
        )
        model_card.write(card, directory)
    if not has_auto_tokeniser:
        print(f'note: {model_card.OTHER_TOKENS}')
    return directories


def _reward_model_in(model_dir: str) -> trained_models.TrainedModel | None:
    """The reward model that `model_dir` (path or URL) means; None where it is a language model.

    It is that of a run without a policy, or a directory with nothing else. RUN/reward_model is also
    that of a policy's run whose checkpoint alone has it, as after --rewards.online.
    """
    run, _, last = model_dir.rstrip('/').rpartition('/')
    if _has(model_dir, run_files.REWARD) and not _has(model_dir, run_files.POLICY):
        return reward_on_labels.saved_model(model_dir)
    is_own = storage.exists(storage.join(model_dir, 'hparams.json'))
    if last == run_files.REWARD.network and not is_own and _has(run or '.', run_files.POLICY):
        return reward_on_labels.saved_model(storage.join(run or '.', run_files.POLICY.network))
    model = trained_models.TrainedModel(model_dir)
    if not model.is_reward_model():
        return None
    assert model.savedir is not None  # the model 'test' is none
    return reward_on_labels.saved_model(model.savedir)


def _has(directory: str, files: run_files.CommandFiles) -> bool:
    """Whether a directory (path or URL) is a run with the network of that command."""
    return storage.exists(storage.join(directory, files.network, 'hparams.json'))


def _export_reward_model(
    saved: trained_models.TrainedModel, place: places.Place, output_dir: str
) -> float:
    """Save a reward model as a sequence classifier, once it is known to give the same rewards.

    saved: one of its sizes and encoding. Returns the constant that its scores lack.
    """
    encoding, name = saved.encoding, saved.name
    with warnings_only():
        model = rewards.TrainedRewardModel(place.directory, encoding, scope=place.scope)
    model.to('cpu')
    head = classifier.RewardHead.folded(
        model.model.heads['reward'], model.reward_gain, model.reward_bias
    )
    with precision.plain():
        made = classifier.classifier_of(
            saved.as_transformers(model.model), head, encoding.n_vocab, name
        )
        classifier.check(made, lambda tokens: _reward(model, tokens), encoding.n_vocab, name)
    made.model.save_pretrained(output_dir)
    tokeniser.write_tokeniser(encoding, saved.hparams().n_ctx, output_dir)
    return made.constant


def _reward(model: rewards.TrainedRewardModel, tokens: Sequence[int]) -> float:
    """The reward of a text of one or more tokens."""
    return model.score(torch.tensor([tokens]), torch.tensor([[model.padding_token]])).item()
