"""Adam as TensorFlow does it, with its slots under TensorFlow's names (the original's utils.core.minimize)."""
import numpy as np
import torch

from lm_human_preferences.utils.core import adam_epsilon

BETAS = (0.9, 0.999)


class Adam:
    """Minimises a loss over parameters {TensorFlow variable name: Parameter}; gradients are averaged over ranks."""

    def __init__(self, parameters, *, comm):
        self.parameters = parameters
        self.steps = 0
        self.gradients = comm.average_gradients(parameters.values())
        self.optimizer = torch.optim.Adam(parameters.values(), betas=BETAS, fused=True)

    def minimize(self, loss, lr):
        """One update against the gradient of the scalar `loss`."""
        self.gradients.clear()
        self.backward(loss, last=True)
        self.update(lr)

    def backward(self, loss, *, last):
        """Add the gradient of the scalar `loss`; `last`: no more follows before the update."""
        if last:
            self.gradients.expect_last()
        loss.backward()

    def update(self, lr):
        """Average the gradients that were added since `gradients.clear()`, and take the step."""
        self.gradients.wait()
        self.steps += 1
        self.optimizer.param_groups[0].update(lr=lr, eps=adam_epsilon(self.steps))
        self.optimizer.step()

    def start_at(self, steps):
        """Make ready to go on after `steps` updates: the moments, which `tf_slots` gives, are to be filled in."""
        self.steps = steps
        for parameter in self.parameters.values() if steps else ():
            self.optimizer.state[parameter] = {
                'step': torch.tensor(float(steps), device=parameter.device),
                'exp_avg': torch.zeros_like(parameter), 'exp_avg_sq': torch.zeros_like(parameter)}

    def tf_slots(self, scope):
        """The moments and beta powers as the original's checkpoints name them, tensors by variable name."""
        slots = {f'{scope}/beta{i}_power': torch.tensor(np.float32(beta ** (self.steps + 1)))
                 for i, beta in enumerate(BETAS, start=1)}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter) or dict.fromkeys(
                ('exp_avg', 'exp_avg_sq'), torch.zeros((), device=parameter.device).expand_as(parameter))
            slots[f'{name}/adam'], slots[f'{name}/adam_1'] = state['exp_avg'], state['exp_avg_sq']
        return slots
