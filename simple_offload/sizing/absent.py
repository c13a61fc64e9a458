"""In place of what a plan does not need and this machine may lack: kernels, streams, experts, and
the values of weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Absent(int):
    """Made with any arguments. Layers ask it for flags and sizes: all are 0."""

    def __new__(cls, *_: object, **__: object) -> "Absent":
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __call__(self, *_: object, **__: object) -> "Absent":
        return self


class NoExperts(torch.nn.Module):
    """In place of vLLM's layer of experts, which looks for kernels of the device."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(Absent(), name)


class ZeroValues(TorchFunctionMode):
    """Tensors on the meta device have values: zeros. Some layers read constants back when they are
    made (a scale, ALiBi's slopes)."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (torch.Tensor.item, torch.Tensor.tolist) and args[0].is_meta:
            args = (torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:])
        return function(*args, **(kwargs or {}))
