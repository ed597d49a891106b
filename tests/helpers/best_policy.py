"""The best policy possible, where its probabilities can be written down."""


def optimal_logprobs(ref_logprobs, rewards, beta):
    """log pi*(y|x), which maximises E[reward] - beta KL: shaped like `ref_logprobs` and
    `rewards`."""
    return (ref_logprobs.double() + rewards.double() / beta).log_softmax(-1)
