"""The proximal policy's log-probs: what a trust region is measured from."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrun.config.algorithm.names import PROXIMAL_METHODS, check_known


def proximal_logprobs(
    method: str,
    logprobs: Tensor,
    inference_logprobs: Tensor,
    *,
    versions: Tensor | None = None,
    policy_version: int | None = None,
    checked: bool = False,
) -> Tensor:
    """Log-probs o of the policy that an update may not move far from, `[T]`, detached.

    Args:
        method: `inference`: o = i. `recompute`: o = `logprobs`, which are those at the start of the step. `log_linear`: between the two
            by the versions, o = i + α(t - i) with α = clamp((v_θ - 1 - v_b)/(v_θ - v_b), 0, 1), and 0 where v_θ = v_b (AReaL).
        logprobs: `[T]`, t, of the policy that is trained.
        inference_logprobs: `[T]`, i, as sampled.
        versions: `[T]` integers, v_b, the version that sampled each token; for `log_linear`.
        policy_version: v_θ, the version that is trained; for `log_linear`.
        checked: whether no version is newer than the policy's.

    Raises:
        ValueError: an unknown method; tensors of different shape; versions that are missing or newer than the policy.
    """
    check_known("method", method, PROXIMAL_METHODS)
    if logprobs.shape != inference_logprobs.shape:
        raise ValueError(
            f"inference_logprobs has shape {tuple(inference_logprobs.shape)}, logprobs has {tuple(logprobs.shape)}"
        )
    t, i = logprobs.detach(), inference_logprobs.detach()
    if method == "inference":
        return i
    if method == "recompute":
        return t
    if versions is None or policy_version is None:
        missing = "versions" if versions is None else "policy_version"
        raise ValueError(f"{missing} must be given for method log_linear")
    if versions.shape != t.shape:
        raise ValueError(f"versions has shape {tuple(versions.shape)}, logprobs has {tuple(t.shape)}")
    age = policy_version - versions.to(t.device)
    if not checked and bool((age < 0).any()):
        raise ValueError(f"versions must be at most policy_version ({policy_version}), got {int(versions.max())}")
    dtype = torch.promote_types(t.dtype, torch.float32)
    share = torch.where(age > 0, (age - 1) / age.clamp(min=1), 0).clamp(0, 1).to(dtype)
    return i.to(dtype) + share * (t.to(dtype) - i.to(dtype))
