"""Answers without training: the values of our recipes beside the printed ones."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.claims import Evidence, counted
from mezzo_core.reproduction.criteria import Within
from mezzo_core.reproduction.measurement import How, Measurement, entries
from mezzo_core.reproduction.published import Claim, Value


def in_recipes(
    recipes: Mapping[str, Callable[[], Any]],
    rounded: Mapping[str, float] | None = None,
    **further: Callable[[Any], Value],
) -> Evidence:
    """Answer a printed set-up by values of our recipes, which the claim's `ours` names.

    Each of `ours` is an expression: a path into the recipe, such as `optim.lr` or `optim.betas.0`,
    or sums and products of paths and whole numbers, such as `steps * batch_size * seq_len`. A list
    counts as its length, and `built` is the recipe's model. `NAME: ` before an expression takes
    another recipe. `further` are functions of a recipe, by the names that `ours` gives them. What
    the paper prints `rounded` has a relative tolerance, see `Within`.
    """

    def compare(claim: Claim) -> Measurement:
        ours, used = dict[str, Value](), dict[str, None]()
        for label, expression in zip(claim.labels, claim.ours, strict=True):
            if expression:
                name, _, path = expression.rpartition(": ")
                used[name or claim.recipe] = None
                recipe = recipes[name or claim.recipe]()
                ours[label] = further[path](recipe) if path in further else _value(recipe, path)
        return beside_printed(claim, ours, f"recipes {', '.join(used)}")

    return counted(compare, Within(rounded or {}))


def _value(recipe: Any, expression: str) -> Value:
    """Return the value of an expression, see `in_recipes`."""
    terms = (prod(_found(recipe, path) for path in t.split(" * ")) for t in expression.split(" + "))
    return sum(terms)


def _found(found: Any, path: str) -> Any:
    if path.isdigit():
        return int(path)
    for name in path.split("."):
        if name == "built":
            found = on_meta(found.model)
        else:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
    return len(found) if hasattr(found, "__len__") else found


def beside_printed(claim: Claim, ours: Mapping[str, Value], setting: str) -> Measurement:
    """Put our values beside those of the paper that have the same labels, for `Within`.

    Labels that we have no value for (number of GPUs) are named in the setting.
    """
    rows = {
        label: (value, ours[label]) for label, value in claim.labelled().items() if label in ours
    }
    left_out = ", ".join(label for label in claim.labels if label not in ours)
    setting += f"; left out: {left_out}" if left_out else ""
    columns = ("printed", "ours")
    return Measurement(entries(rows, columns), columns, setting, How.PAPER)
