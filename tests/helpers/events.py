"""Reading TensorBoard files back."""

from compare import SUM_ATOL, assert_close
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CLOCK = ('elapsed/fps', 'elapsed/time')


def events_of(directory):
    guidance = {'scalars': 0, 'tensors': 0}
    accumulator = EventAccumulator(str(directory), size_guidance=guidance).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()['scalars']
    }


def assert_events(directory, recorded, *, rtol):
    """Check each recorded event, {folder: [[tag, step, value], ...]}; the last ones were lost."""
    for folder, expected in recorded.items():
        ours = events_of(directory / folder)
        for tag, step, value in expected:
            assert step in dict(ours[tag]), (tag, step)
            if tag not in CLOCK:
                found = dict(ours[tag])[step]
                assert_close(found, value, rtol=rtol, atol=SUM_ATOL, name=f'{tag} {step}')
