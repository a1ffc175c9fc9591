"""A picture of a run: grouped bars, one panel per pass, as the FlashAttention papers draw them."""

import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.measuring.benchmark import UNITS
from benchmarks.reporting.report import Run, where
from ejkernel.ops.files import write_whole

# Okabe and Ito's colours, which everybody can tell apart, and Tol's wine; ours strong, peers after them
OURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#882255")
PEERS = ("#56B4E9", "#E69F00", "#CC79A7", "#999999", "#F0E442")


def _colors(run: Run) -> dict[str, str]:
    ours, peers = iter(OURS), iter(PEERS)
    return {name: next(ours if platform else peers, "#BBBBBB") for name, platform in run["contenders"].items()}


# cases of each length that a group has on average, up to which its lengths share a panel
FEW = 2
# cases of a row at most: there is no room for more labels
MOST = 7


def _rows(run: Run) -> list[tuple[str, list[str], str]]:
    """(title, cases, unit) of each row of panels: cases that differ in head dim and mask alone, times before rates.

    In a group with only few of each length, they differ in length too. Runs that were joined come in their order.
    """
    rows: dict[tuple[int, bool, str, str], dict[int, list[str]]] = {}
    for name, facts in run["cases"].items():
        key = (facts.get("run", 0), facts["unit"] != "ms", facts["unit"], facts["group"])
        rows.setdefault(key, {}).setdefault(facts.get("T", 0), []).append(name)
    split_rows = []
    for (_, _, unit, group), lengths in sorted(rows.items()):
        groups = [lengths[T] for T in sorted(lengths)]
        if sum(map(len, groups)) <= FEW * len(groups):
            groups = _split([case for cases in groups for case in cases])
        titles = [", ".join(filter(None, (group, _common(run, cases)))) for cases in groups]
        split_rows += [(title, cases, unit) for title, cases in zip(titles, groups, strict=True)]
    return split_rows


def _split(cases: list[str]) -> list[list[str]]:
    """As few rows as will do, of much the same length."""
    rows = -(-len(cases) // MOST)
    return [cases[len(cases) * row // rows : len(cases) * (row + 1) // rows] for row in range(rows)]


def _passes(run: Run, cases: list[str]) -> list[str]:
    """Those that somebody did, of any of the cases."""
    return list(dict.fromkeys(r["what"] for r in run["results"] if r["case"] in cases))


def _sizes(run: Run, case: str) -> list[str]:
    return case.removeprefix(run["cases"][case]["group"]).split()


def _common(run: Run, cases: list[str]) -> str:
    """The sizes that all of them share."""
    return " ".join(word for word in _sizes(run, cases[0]) if all(word in _sizes(run, case) for case in cases))


def _label(run: Run, case: str, cases: list[str]) -> str:
    """What tells a case from the others of its row; the head count follows from the head dim."""
    shared = _common(run, cases).split()
    words = [word for word in _sizes(run, case) if word not in shared and not word.startswith("H")]
    return " ".join(words) or run["cases"][case]["group"]


def _panel(axes: Any, run: Run, cases: list[str], what: str, unit: str) -> None:
    field, digits = "milliseconds" if unit == "ms" else "rate", UNITS[unit].digits
    values = {
        (r["case"], r["contender"]): r[field]
        for r in run["results"]
        if r["what"] == what and r["status"] == "ok" and r["case"] in cases
    }
    colors = _colors(run)
    shown = [name for name in run["contenders"] if any((case, name) in values for case in cases)]
    cases = sorted(cases, key=lambda case: run["cases"][case].get("D", 0))
    width = 0.85 / max(1, len(shown))
    for number, name in enumerate(shown):
        at = [i + (number - (len(shown) - 1) / 2) * width for i in range(len(cases))]
        ours = run["contenders"][name] is not None
        edge = {"edgecolor": "black", "linewidth": 0.8} if ours else {"edgecolor": "white", "linewidth": 0.4}
        heights = [values.get((case, name), float("nan")) for case in cases]
        bars = axes.bar(at, heights, width, label=name, color=colors[name], **edge)
        texts = ["" if value != value else f"{value:{digits}}" for value in heights]
        axes.bar_label(bars, texts, fontsize=6, rotation=90, padding=2)
    labels = [_label(run, case, cases) for case in cases]
    slanted = {"rotation": 20, "ha": "right"} if sum(map(len, labels)) > 60 else {}
    axes.set_xticks(range(len(cases)), labels, **slanted)
    axes.set_ylabel(f"{unit} (less is better)" if unit == "ms" else unit)
    if unit == "ms" and values and max(values.values()) > 20 * min(values.values()):
        axes.set_yscale("log")
    axes.margins(y=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def draw(run: Run, path: Path) -> None:
    """Write the picture; the suffix decides the format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # words, not outlines
    matplotlib.rcParams["svg.hashsalt"] = "ejkernel"
    from matplotlib import pyplot

    rows = _rows(run)
    passes = [_passes(run, cases) for _, cases, _ in rows]
    wide = max([1, *map(len, passes)])
    figure, panels = pyplot.subplots(
        len(rows), wide, figsize=(7 * wide, 3.4 * len(rows) + 1.2), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for (title, cases, unit), row_passes, across in zip(rows, passes, panels, strict=True):
        for axes in across[len(row_passes) :]:
            axes.set_visible(False)
        for what, axes in zip(row_passes, across, strict=False):
            _panel(axes, run, cases, what, unit)
            axes.set_title(f"{title}: {what}", fontsize=10)
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    ordered = {name: handles[name] for name in run["contenders"] if name in handles}
    figure.legend(ordered.values(), ordered.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.supxlabel(textwrap.fill(where(run), 80 * wide), fontsize=7)
    picture, suffix = BytesIO(), path.suffix.removeprefix(".").lower()
    figure.savefig(picture, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, picture.getvalue())
