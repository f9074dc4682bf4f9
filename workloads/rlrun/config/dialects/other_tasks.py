"""Completion of what supervised fine-tuning and evaluation have in another project's names."""

from __future__ import annotations

from rlrun.config.dialects.run_view import RunView


def complete_data(run: RunView) -> None:
    """Sources of data, from names of splits or subsets and their shares; or fake data."""
    names = "splits" if run.hint("subsets") is None else "subsets"
    if names == "subsets":
        if run.hint("splits") is not None:
            run.refuse(
                "subsets", "beside splits: a source has one of them; write data.sources with path or name, and split"
            )
            return
        run.note("subsets", "each is a source of the files and folders of that name, of every split that is there")
    _list_sources(run, names)
    _kind_of_data(run)


def _list_sources(run: RunView, hint: str) -> None:
    """A source for each name of a hint, like the one that is there, with their shares."""
    names, shares = run.hint(hint), run.hint("probabilities")
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        run.refuse(hint, f"got {names!r:.60}, expected a list of names")
    elif names:
        first = run.get("data.sources[0]")
        if isinstance(first, dict):
            sources = [first | {"split": one} for one in names]
            if isinstance(shares, list) and len(shares) == len(sources):
                sources = [one | {"weight": share} for one, share in zip(sources, shares, strict=True)]
            run.put("data.sources", sources, hint, over=True)
    elif shares is not None:
        run.refuse("probabilities", "there is one source; probabilities are of several splits")


def _kind_of_data(run: RunView) -> None:
    """Fake data, by either of its names; a kind that is not known is refused."""
    kind = run.hint("data_type")
    if kind == "fake" or run.hint("data_fake") not in (None, False):
        run.put("data.sources", [{"path": "fake"}], "data_type" if kind == "fake" else "data_fake")
    if kind not in (None, "sft", "fake"):
        run.refuse("data_type", f"got {kind!r:.60}, expected sft or fake")


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
