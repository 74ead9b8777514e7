"""The documentation of one key, as `gspo config explain` prints it."""

from __future__ import annotations

from gspo.config.compat.aliases import Alias, aliases, aliases_of
from gspo.config.compat.unneeded import fixed_values, why_unneeded
from gspo.config.loading import names, tree
from gspo.config.loading.resolve import load
from gspo.config.loading.tree import Leaf
from gspo.config.text.show import scalar


def allowed_text(leaf: Leaf) -> str:
    """The allowed values of a key, or an empty text when its type says it all."""
    info = leaf.info
    if info.choices:
        more = ", or a name that you registered" if info.open else ""
        return ", ".join(str(c) for c in info.choices) + more
    parts = [
        f"{sign} {bound:g}"
        for sign, bound in ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
        if bound is not None
    ]
    return " and ".join(parts)


def explain(name: str) -> tuple[str, bool]:
    """The explanation of a key, alias or section, and whether the name is known."""
    alias = aliases().get(name)
    key = names.canonical(name) or (alias.target if alias else None)
    if key is not None:
        text = _leaf_text(tree.leaf_of(key) or tree.leaves()[key])
        if alias is not None and alias.name != key:
            text = f"{_alias_text(alias)}\n\n{text}"
        return text, True
    if name in tree.sections():
        below = [f"  {k}: {leaf.info.doc}" for k, leaf in tree.leaves().items() if k.startswith(f"{name}.")]
        return "\n".join([f"{name}: {tree.sections()[name].__doc__}", *below]), True
    several = names.candidates(name)
    if several:
        return "\n\n".join(_leaf_text(tree.leaves()[k]) for k in several), True
    reason = why_unneeded(name)
    if reason is not None:
        return f"{name}: accepted with a warning; has no effect here: {reason}", True
    fixed = fixed_values(name)
    if fixed is not None:
        allowed = ", ".join(map(str, (*fixed.values, "null")))
        return f"{name}: of another system; only {allowed} is accepted: {fixed.remedy}", True
    return f"unknown key {name}; {names.suggestion(names.nearest(name))}", False


def _alias_text(alias: Alias) -> str:
    text = f"{alias.name}: another name for {alias.target}, from {alias.system}."
    return f"{text} {alias.doc}".rstrip()


def _leaf_text(leaf: Leaf) -> str:
    embedded = load()
    lines = [leaf.key, f"  {leaf.info.doc}", f"  type: {leaf.type_name}", f"  default: {scalar(leaf.default)}"]
    if embedded.get(leaf.key) != leaf.default:
        lines.append(f"  with the embedded model: {scalar(embedded.get(leaf.key))} ({embedded.origin(leaf.key)})")
    if leaf.info.unit:
        lines.append(f"  unit: {leaf.info.unit}")
    if allowed_text(leaf):
        lines.append(f"  allowed: {allowed_text(leaf)}")
    if leaf.info.example:
        lines.append(f"  example: {leaf.info.example}")
    if leaf.info.may_change_on_resume:
        lines.append("  resume: may change when a run is resumed")
    lines += [f"  other name: {a.name} ({a.system})" + (f": {a.doc}" if a.doc else "") for a in aliases_of(leaf.key)]
    return "\n".join(lines)
