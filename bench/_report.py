"""What the benchmark shows: progress, tables (rich where installed, plain text else), JSON and PNG."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2.0**20
#: Bars longer than this many times eager's are cut off.
_WIDEST = 1.5
COLOURS = {"eager": "#9aa0a6", "compile": "#e0a030", "converted": "#8ab4f8", "pyckpt": "#1f6feb"}
_NEEDS_MATPLOTLIB = (
    "drawing needs matplotlib: pip install matplotlib (it is in the extra: pip install 'pyckpt[bench]')"
)


def progress(items: Sequence[Any], title: str, labels: Sequence[Any] | None = None) -> Iterator[Any]:
    """Yield the items behind a progress bar on stderr; without rich or a terminal, a line for each."""
    labels = items if labels is None else labels
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=len(items), now="")
            for item, label in zip(items, labels, strict=True):
                bar.update(task, now=str(label))
                yield item
                bar.advance(task)
        return
    for index, (item, label) in enumerate(zip(items, labels, strict=True), 1):
        print(f"[{index}/{len(items)}] {title}: {label}", file=sys.stderr, flush=True)
        yield item


def print_table(title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout: text columns align left, columns of figures right."""
    lines = [list(line) for line in lines]
    numeric = [all(_is_figure(line[i]) for line in lines) for i in range(len(header))]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for name, right in zip(header, numeric, strict=True):
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for line in lines:
            table.add_row(*map(escape, line), style="bold" if "pyckpt" in line else None)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [list(header), *lines]) for i in range(len(header))]
    print(f"\n{title}")
    for line in [list(header), ["-" * width for width in widths], *lines]:
        cells = (
            t.rjust(w) if right else t.ljust(w) for t, w, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(cells).rstrip())


def _is_figure(text: str) -> bool:
    return text == "" or text.replace(".", "", 1).replace(",", "").rstrip("x%").lstrip("+-").isdigit()


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:.2f}"


#: Header and text of each column of the throughput table: what was measured, and the figures.
_CASE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    name: lambda row, name=name: row[name]  # type: ignore[misc]
    for name in ("op", "dtype", "shape", "layout")
}
_FIGURES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "impl": lambda row: row["impl"],
    "fwd ms": lambda row: f"{row['forward_ms']:.3f}",
    "step ms": lambda row: f"{row['step_ms']:.3f}",
    "ratio": lambda row: f"{row['ratio']:.2f}x",
    "best": lambda row: f"{row['least_ratio']:.2f}x",
    "GB/s": lambda row: f"{row['gbps']:.1f}",
    "x copy": lambda row: f"{row['step_ms'] / row['copy_ms']:.1f}x",
    "kept MiB": lambda row: _mib(row["saved_bytes"]),
    "peak MiB": lambda row: _mib(row["peak_bytes"]),
}
_EXPLANATION = """\
Medians of forward (fwd) and of forward + backward (step).
ratio: eager's step / this step; best: that of the fastest samples; x copy: step / a copy of the same bytes;
kept: what forward keeps for backward; peak: the most that a step has allocated at any one moment."""


def _print_throughput(rows: Sequence[Mapping[str, Any]]) -> None:
    """In a terminal by groups that fit 80 columns; else a line a row, to search and to cut."""
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        columns = {**_CASE, **_FIGURES}
        print_table(_EXPLANATION, list(columns), [[text(row) for text in columns.values()] for row in rows])
        return
    from rich.console import Console
    from rich.text import Text

    cells = [[text(row) for text in _FIGURES.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(list(_FIGURES), *cells, strict=True)]

    def line(texts: Sequence[str]) -> str:
        first, *others = (text.rjust(width) for text, width in zip(texts, widths, strict=True))
        return "  ".join((texts[0].ljust(len(first)), *others))

    console = Console(highlight=False)
    console.print(f"\n{_EXPLANATION}\n\n{line(list(_FIGURES))}", style="dim", soft_wrap=True)
    case = ""
    for row, texts in zip(rows, cells, strict=True):
        if (heading := " ".join(text(row) for text in _CASE.values())) != case:
            console.print(Text(heading, style="underline"), soft_wrap=True)
            case = heading
        console.print(Text(line(texts), style="bold" if row["impl"] == "pyckpt" else ""), soft_wrap=True)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The throughput table, the call overhead table and whatever has no figures."""
    timed = [row for row in rows if row["step_ms"] is not None]
    if throughput := [row for row in timed if row["kind"] == "throughput"]:
        _print_throughput(throughput)
    lines = [
        [
            row["op"],
            row["dtype"],
            row["impl"],
            *(f"{row[key] * 1e3:.1f}" for key in ("forward_ms", "step_ms")),
        ]
        for row in timed
        if row["kind"] == "overhead"
    ]
    if lines:
        print_table("Cost of a call on an 8x8 input", ("op", "dtype", "impl", "forward us", "step us"), lines)
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            name = f"{row['op']} {row['dtype']} {row['shape']} {row['layout']}"
            missing.setdefault(f"{row['impl']} {row['status']}", []).append(name)
    for status, names in missing.items():
        more = " ..." if len(names) > 4 else ""
        print(f"\n{status}\n  in {len(names)} row(s): {'; '.join(names[:4])}{more}")


def print_mapping(title: str, values: Mapping[str, Any]) -> None:
    """One line: title, then name=value for what is known."""
    print(f"{title}: " + ", ".join(f"{name}={value}" for name, value in values.items() if value is not None))


def caption(machine: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """Where the figures come from, for a plot."""
    return f"{machine['processor']}, {machine['torch_threads']} threads, torch {versions['torch']}"


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write the whole result object."""
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def prepare(json_path: str | None, plot_path: str | None) -> None:
    """See now, not after minutes of measuring, that the results can be written.

    Raises:
        ModuleNotFoundError: a plot is wanted and matplotlib is absent.
        OSError: a file cannot be created.
    """
    if plot_path:
        require_matplotlib()
    for path in filter(None, (json_path, plot_path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass


def require_matplotlib() -> Any:
    """matplotlib.pyplot on the file-only backend.

    Raises:
        ModuleNotFoundError: saying what to install.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(_NEEDS_MATPLOTLIB)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_rows(path: str | Path, rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """Step time of every op as a share of eager's, one panel a dtype; a tick marks a copy of the same bytes.

    Of several contiguous shapes the one with the most implementations is drawn, then the largest.
    """
    plt = require_matplotlib()
    shapes: dict[tuple[str, str], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        if row["kind"] == "throughput" and row["layout"] == "contiguous" and row["step_ms"] is not None:
            shapes.setdefault((row["dtype"], row["op"]), {}).setdefault(row["shape"], {})[row["impl"]] = row
    chosen = {
        key: max(groups.values(), key=lambda group: (len(group), group["eager"]["step_bytes"]))
        for key, groups in shapes.items()
    }
    dtypes, ops = (list(dict.fromkeys(key[i] for key in chosen)) for i in (0, 1))
    if not chosen:
        print("no contiguous throughput row to draw", file=sys.stderr)
        return
    size = (6.2 * len(dtypes), 1.6 + 0.55 * len(ops))
    figure, axes = plt.subplots(
        1, len(dtypes), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for index, op in enumerate(ops):
            _draw_group(axis, index, chosen.get((dtype, op), {}))
        axis.set_title(dtype, fontsize=10)
        axis.set_xlabel("forward + backward, share of eager's time (shorter is better)")
        axis.set_yticks(range(len(ops)), [_label(op, chosen) for op in ops])
        axis.set_xlim(0, _WIDEST + 0.1)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    handles = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(where, fontsize=8)
    save_figure(figure, path)
    plt.close(figure)


def _label(op: str, chosen: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]) -> str:
    shapes = {row["shape"] for (_, other), group in chosen.items() if other == op for row in group.values()}
    return f"{op}\n{', '.join(sorted(shapes))}"


def _draw_group(axis: Any, index: int, group: Mapping[str, Mapping[str, Any]]) -> None:
    """The bars of one op, from top to bottom in the order of the rows."""
    if not group:
        return
    height = 0.84 / len(group)
    whole = group["eager"]["step_ms"]
    for place, (impl, row) in enumerate(group.items()):
        y = index - 0.42 + (place + 0.5) * height
        share = row["step_ms"] / whole
        axis.barh(y, min(share, _WIDEST), height * 0.92, color=COLOURS.get(impl), label=impl)
        text = f" {row['step_ms']:.2f} ms" + ("" if impl == "eager" else f", {row['ratio']:.1f}x ")
        if share > _WIDEST:  # cut off, and the text says how far it would reach
            axis.text(_WIDEST, y, f"{text}>", va="center", ha="right", fontsize=7)
        else:
            axis.text(share, y, text, va="center", fontsize=7)
    copy = group["eager"]["copy_ms"] / whole
    axis.plot(
        [copy, copy], [index - 0.44, index + 0.44], color="black", lw=1.5, label="copy of the same bytes"
    )


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=140, format="png")
    print(f"wrote {path}")
