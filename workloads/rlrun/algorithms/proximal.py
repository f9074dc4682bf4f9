"""Log-probs of the proximal policy, the center of a trust region."""

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
    """Return the log-probs o of the proximal policy, `[T]`, detached.

    Args:
        method: `inference`: o = i. `recompute`: o = `logprobs`, computed at the start of the step. `log_linear`: interpolation by
            versions, o = i + α(t - i) with α = clamp((v_θ - 1 - v_b)/(v_θ - v_b), 0, 1), and α = 0 if v_θ = v_b (AReaL).
        logprobs: log-probs t of the trained policy, `[T]`.
        inference_logprobs: log-probs i at sampling, `[T]`.
        versions: version v_b that sampled each token, `[T]` integers; for `log_linear`.
        policy_version: trained version v_θ; for `log_linear`.
        checked: true if the caller has checked that no version is newer than the policy.

    Raises:
        ValueError: the method is unknown, shapes differ, or versions are missing or newer than the policy.
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
