"""What the commands do, each as 'module:function'.

A command hands its job over by name, because importing it loads torch. Whatever is named here can
be imported: a test tries all of them.
"""

import enum
from typing import Any

from lm_human_preferences.hparams import figure_options


class JobName(enum.StrEnum):
    """The name of a job for launch.start_job."""

    TRAIN_REWARD = 'lm_human_preferences.train_reward:train'
    TRAIN_POLICY = 'lm_human_preferences.train_policy:train'
    SAMPLE = 'lm_human_preferences.commands.sample_policy:sample_policy'
    EXPORT = 'lm_human_preferences.commands.export_model:export'
    DOCTOR = 'lm_human_preferences.commands.doctor:doctor'
    EVALUATE = 'lm_human_preferences.evaluation.evaluate:evaluate'
    REPORT = 'lm_human_preferences.commands.write_report:write_report'
    FIGURES = 'lm_human_preferences.reproduction.figures:figures'
    ONLINE_FIGURES = 'lm_human_preferences.reproduction.online_figures:figures'
    LABEL_FIGURES = 'lm_human_preferences.reproduction.label_figures:figures'
    ASK = 'lm_human_preferences.commands.ask:ask'
    IMPORT_LABELS = 'lm_human_preferences.commands.texts.import_labels:import_labels'
    LABEL = 'lm_human_preferences.commands.answer_questions:label'
    LABELS = 'lm_human_preferences.commands.report_labels:report_labels'
    SCORE = 'lm_human_preferences.commands.texts.score:score'


def figure_job(options: figure_options.HParams) -> tuple[JobName, dict[str, Any]]:
    """The figures that `options` ask for, and what their job gets of the options."""
    arguments = options.to_nested_dict()
    of_reward_models = {name: arguments.pop(name) for name in ('ensemble', 'epochs', 'initial')}
    online, labels = arguments.pop('online'), arguments.pop('labels')
    if online:
        return JobName.ONLINE_FIGURES, {**arguments, **of_reward_models}
    return JobName.LABEL_FIGURES if labels else JobName.FIGURES, arguments
