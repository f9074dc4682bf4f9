"""Completion of what supervised fine-tuning and evaluation have in another project's names."""

from __future__ import annotations

from rlrun.config.dialects.run_view import RunView


def complete_data(run: RunView) -> None:
    """Sources of data, from names of splits or subsets and their shares; or fake data."""
    splits, shares = run.hint("splits"), run.hint("probabilities")
    subsets = run.hint("subsets")
    if subsets is not None and splits is not None:
        run.refuse(
            "subsets", "beside splits: a source has one of them; write data.sources with path or name, and split"
        )
        return
    if subsets is not None:
        splits = subsets
        run.note("subsets", "each is a source of the files and folders of that name, of every split that is there")
    if splits is not None and not (isinstance(splits, list) and all(isinstance(one, str) for one in splits)):
        run.refuse("splits" if subsets is None else "subsets", f"got {splits!r:.60}, expected a list of names")
    elif splits:
        first = run.get("data.sources[0]")
        if isinstance(first, dict):
            sources = [first | {"split": one} for one in splits]
            if isinstance(shares, list) and len(shares) == len(sources):
                sources = [one | {"weight": share} for one, share in zip(sources, shares, strict=True)]
            run.put("data.sources", sources, "splits" if subsets is None else "subsets", over=True)
    elif shares is not None:
        run.refuse("probabilities", "there is one source; probabilities are of several splits")
    if run.hint("data_type") == "fake" or run.hint("data_fake") not in (None, False):
        name = "data_type" if run.hint("data_type") == "fake" else "data_fake"
        run.put("data.sources", [{"path": "fake"}], name)
    if run.hint("data_type") not in (None, "sft", "fake"):
        run.refuse("data_type", f"got {run.hint('data_type')!r:.60}, expected sft or fake")


def complete_policies(run: RunView) -> None:
    """The model itself is measured beside a run's policies, unless it is left out."""
    base = run.hint("eval_base")
    if base is not None and not isinstance(base, bool):
        run.refuse("eval_base", f"got {base!r:.60}, expected true or false")
    elif run.hint("eval_steps") is not None:
        run.put("policies.base", base is not False, "eval_steps" if base is None else "eval_base")
    elif base is False and run.get("policies.from_run") is None:
        run.refuse("eval_base", "nothing would be measured; name a folder of policies, weights_dir")
    elif base is False:
        run.note("eval_base", "the model itself is measured too, unless steps names the policies")
