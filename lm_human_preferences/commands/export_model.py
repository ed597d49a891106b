"""Writing a trained model as a Hugging Face directory (safetensors), for other tools."""

import os

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import trained_models

# The end of an error.
_WHAT_CAN_BE = (
    'a Hugging Face language model has no place for a score. Give a run of train_policy, or the'
    ' directory or name of a language model'
)


def export(model_dir: str, output_dir: str) -> None:
    """Save a language model to `output_dir`, as Hugging Face's transformers reads it.

    model_dir: a run, a model directory or a released name. The value head is left out: a
    transformers language model has none. UserError for a reward model.
    """
    is_empty_folder = os.path.isdir(output_dir) and not os.listdir(output_dir)
    if os.path.exists(output_dir) and not is_empty_folder:
        raise UserError(f'{output_dir} is not empty: give a new directory')
    _refuse_reward_run(model_dir)
    trained_model = trained_models.TrainedModel(model_dir)
    _refuse_reward_model(trained_model)
    trained_model.to_transformers().save_pretrained(output_dir)
    trained_model.encoding.write_tokeniser(output_dir)
    print(f'Saved {model_dir} to {output_dir}')


def _refuse_reward_run(model_dir: str) -> None:
    """UserError if `model_dir` (path or URL) is a run of train_reward, which has no policy."""
    reward_model, policy = (
        storage.join(model_dir, name, 'hparams.json') for name in ('reward_model', 'policy')
    )
    if storage.exists(reward_model) and not storage.exists(policy):
        raise UserError(f'{model_dir} holds a reward model but no policy, and {_WHAT_CAN_BE}')


def _refuse_reward_model(trained_model: trained_models.TrainedModel) -> None:
    """UserError if it has a reward head, which the exported model could not have."""
    if trained_model.is_reward_model():
        raise UserError(f'{trained_model.name} is a reward model, and {_WHAT_CAN_BE}')
