"""Reading TensorBoard files back."""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events_of(directory):
    """{tag: [(step, value), ...]} of all event files in `directory`."""
    accumulator = EventAccumulator(str(directory), size_guidance={'scalars': 0, 'tensors': 0}).Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()['scalars']}
