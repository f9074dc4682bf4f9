"""Completion of the parts of supervised fine-tuning and evaluation that have another project's names."""

from __future__ import annotations

from rlrun.config.dialects.run_view import RunView


def complete_data(run: RunView) -> None:
    """Set the sources of data from names of splits or subsets and their shares, or set fake data."""
    names = "splits" if run.hint("subsets") is None else "subsets"
    if names == "subsets":
        if run.hint("splits") is not None:
            run.refuse("subsets", "cannot be combined with splits; write data.sources with path or name, and split")
            return
        run.note(
            "subsets", "each subset becomes a source with the files and folders of that name, in every available split"
        )
    _list_sources(run, names)
    _kind_of_data(run)


def _list_sources(run: RunView, hint: str) -> None:
    """Set one source per name of a hint, as copies of the existing source, with their shares."""
    names, shares = run.hint(hint), run.hint("probabilities")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        run.refuse(hint, f"got {names!r:.60}, expected a list of names")
    elif names:
        first = run.get("data.sources[0]")
        if isinstance(first, dict):
            sources = [first | {"split": name} for name in names]
            if isinstance(shares, list) and len(shares) == len(sources):
                sources = [source | {"weight": share} for source, share in zip(sources, shares, strict=True)]
            run.put("data.sources", sources, hint, over=True)
    elif shares is not None:
        run.refuse("probabilities", "there is only one source; remove probabilities, or write several splits")


def _kind_of_data(run: RunView) -> None:
    """Set fake data, which has two names; refuse unknown kinds of data."""
    kind = run.hint("data_type")
    if kind == "fake" or run.hint("data_fake") not in (None, False):
        run.put("data.sources", [{"path": "fake"}], "data_type" if kind == "fake" else "data_fake")
    if kind not in (None, "sft", "fake"):
        run.refuse("data_type", f"got {kind!r:.60}, expected sft or fake")


def complete_policies(run: RunView) -> None:
    """Evaluate the base model in addition to a run's policies, unless it is excluded."""
    base = run.hint("eval_base")
    if base is not None and not isinstance(base, bool):
        run.refuse("eval_base", f"got {base!r:.60}, expected true or false")
    elif run.hint("eval_steps") is not None:
        run.put("policies.base", base is not False, "eval_steps" if base is None else "eval_base")
    elif base is False and run.get("policies.from_run") is None:
        run.refuse("eval_base", "no policy would be evaluated; set weights_dir to a folder of policies")
    elif base is False:
        run.note("eval_base", "the base model is evaluated too, unless steps selects the policies")
