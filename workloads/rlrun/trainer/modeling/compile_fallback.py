"""Automatic compilation with a fallback to uncompiled operations.

If a forward pass cannot be compiled, torch's tracer runs it in Python. A backward pass is compiled at the first backward call, after the
tracer: if that fails, its traced operations are executed one by one. Each rank falls back independently: the operations are the same and
contain no collectives, nothing has been accumulated or sent, and no pass is repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.fx import GraphModule

_said: set[str] = set()


def compile_layer(layer: nn.Module, *, asked: bool) -> None:
    """Compile a layer's forward and backward pass, in place and lazily.

    Args:
        layer: decoder layer of the model.
        asked: true if the configuration enables compilation; errors of the compiler then end the run.
    """
    options: dict[str, Any] = {} if asked else {"backend": _compile_backend}
    import torch._dynamo.config as tracer  # the import takes seconds

    # Floats such as an epsilon or a scale are constant. As inputs they would be CPU scalars that kernels read in float64; inside of a
    # checkpoint they would need a CPU kernel, for which the compiler first tries a dozen C++ programs.
    tracer.specialize_float = True
    if not asked:
        tracer.suppress_errors = True
    layer.forward = torch.compile(layer.forward, dynamic=True, **options)


def _compile_backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    found: Callable[..., Any] = compile_fx(graph, inputs, inner_compile=_compile_pass)
    return found


def _compile_pass(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile the operations of one pass; if a backward pass cannot be compiled, return its uncompiled operations."""
    if not options.get("is_backward"):
        return compile_operations(graph, inputs, **options)
    kept = copy.deepcopy(graph)  # the compiler changes the graph
    try:
        return compile_operations(graph, inputs, **options)
    except Exception as error:  # the compiler may raise any error
        _warn_once(error)
        from functorch.compile import make_boxed_func

        return make_boxed_func(kept.forward)


def compile_operations(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile the operations of one pass with torch's compiler."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **options)


def _warn_once(error: Exception) -> None:
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0]}"
    if text in _said:  # each kind of layer raises the same error
        return
    _said.add(text)
    logger.warning(
        f"torch cannot compile the backward pass of a layer ({text}); it runs uncompiled and slower, with the same result. "
        "Set trainer.compile: false to disable compilation, or true to end the run at such an error"
    )
