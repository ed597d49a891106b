"""Comparing what the port computes with what was recorded."""

import numpy as np
import torch

# Two units in the last place of a log-probability of -10: all there is to the KL of a first step.
SUM_ATOL = 2e-6


def array(value):
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def assert_close(ours, recorded, *, rtol=1e-4, atol=0.0, name=''):
    """Check shapes, and each element to rtol * |recorded| + atol, nan where nan was recorded."""
    ours, recorded = array(ours), array(recorded)
    assert ours.shape == recorded.shape, f'{name}: shape {ours.shape}, recorded {recorded.shape}'
    np.testing.assert_allclose(ours, recorded, rtol=rtol, atol=atol, err_msg=name)


def assert_norm_close(ours, recorded, *, rtol=1e-4, name=''):
    """The difference is small beside the whole array, as it should be for gradients."""
    ours, recorded = array(ours), np.asarray(recorded)
    assert ours.shape == recorded.shape, f'{name}: shape {ours.shape}, recorded {recorded.shape}'
    difference, norm = np.linalg.norm(ours - recorded), np.linalg.norm(recorded)
    assert difference <= rtol * norm, f'{name}: differs by {difference / norm:.2g} of its norm'


def assert_equal(ours, recorded, *, name=''):
    np.testing.assert_array_equal(array(ours), np.asarray(recorded), err_msg=name)
    assert array(ours).shape == np.shape(recorded), name


def assert_stats(ours, recorded, *, rtol=1e-4, atol=2e-7, elements=None):
    """Compare statistics; one of `elements` may fall on the other side of 'clipfrac'."""
    assert set(ours) == set(recorded)
    for name in sorted(recorded):
        may_flip = 1.01 / elements if elements and name.endswith('clipfrac') else 0
        found = np.asarray(ours[name], np.float64)
        assert_close(found, recorded[name], rtol=rtol, atol=atol + may_flip, name=name)


def tokens(recorded):
    return torch.from_numpy(np.asarray(recorded, np.int64))


def logprobs_from_logits(logits, labels):
    """Return log-probabilities of `labels (...)` under `logits (..., n_vocab)`."""
    # log_softmax errs by 2e-5. At a temperature of 0.001 logits have no digits to spare.
    maximum = logits.detach().amax(-1, keepdim=True)
    chosen = logits.gather(-1, labels.unsqueeze(-1)) - maximum
    total = (logits - maximum).exp_().sum(-1, keepdim=True)
    return (chosen - total.log()).squeeze(-1)
