"""Float32 weights behind a model that computes in bfloat16: gradients are summed, and updates made, in float32."""

import torch
from transformers import PreTrainedModel


class Masters:
    """The trained weights. Where the model computes in float32 they are the model's own parameters; where it computes
    in bfloat16, float32 copies of them, and each parameter's gradient is added to its copy's as soon as it exists.

    Args:
        model: with float32 parameters; those are converted to `dtype` in place.

    Attributes:
        names: of the trained weights, in the order of `trained`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model = model
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        parameters = dict(model.named_parameters())
        self._parameters = [parameters[name] for name in self.names]
        self._masters: list[torch.nn.Parameter] = self._parameters
        if dtype != torch.bfloat16:
            return
        self._masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self._parameters]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = torch.zeros_like(master)
            parameter.register_post_accumulate_grad_hook(_adder(master))

    def trained(self) -> list[torch.nn.Parameter]:
        """What the optimizer updates, float32."""
        return self._masters

    def zero_grad(self) -> None:
        for master in self._masters:
            if self._masters is self._parameters:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()

    def copy_back(self) -> None:
        """After an update: the model computes with the new weights."""
        if self._masters is not self._parameters:
            with torch.no_grad():
                for parameter, master in zip(self._parameters, self._masters, strict=True):
                    parameter.copy_(master)


def _adder(master: torch.nn.Parameter):
    # Mixed-type addition has no vectorized kernel of its own; compiled, it runs at the memory's speed.
    plus = torch.compile(_add, dynamic=True) if master.is_cuda else _add

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None and master.grad is not None
        plus(master.grad, parameter.grad)
        parameter.grad = None

    return add


def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    total += part
