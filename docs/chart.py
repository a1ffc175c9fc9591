"""Draws the chart of the front page, for phones too: `python docs/chart.py` writes docs/images/h200.svg.

One column of bars whose text is text. Every number is one that `benchmarks/results` holds, but for the last panel:
measured on 2026-11-19 beside the fastest peer there is (see the README of linear attention).
"""

import json
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
FILE = DOCS / "images" / "h200.svg"
OURS, PEERS, INK, FAINT = "#3f51b5", "#b0bec5", "#263238", "#607d8b"
WIDTH, LEFT, BAR, GAP = 480, 16, 24, 40

TRAINING = "training T16384 L8 H32 Hkv8 D128 16 documents"
DOCUMENTS = "masked B1 T16384 H32 Hkv8 D128 documents 16 at random"
DECODE = "decode B32 S8192 page64 H32 Hkv8 D128"
SPARSE = "shared blocks T65536 H64 Hkv4 D128 16 blocks"
BOTH = "forward + backward"

# title, unit, whether more is better, and of each bar: its name, and where its number is
PANELS = (
    (
        "Train on 16 packed documents",
        "a whole step, thousand tokens a second: more is better",
        True,
        [
            ("ejkernel", ("model", TRAINING, "training step", "ejkernel auto", "rate")),
            ("fa4-jax, varlen", ("model", TRAINING, "training step", "fa4-jax varlen", "rate")),
            (
                "cuDNN with a mask",
                ("model", TRAINING, "training step", "cuDNN (jax.nn)", "rate"),
            ),
        ],
    ),
    (
        "Attention alone, on 16 documents",
        "16384 tokens, with gradients, milliseconds: less is better",
        False,
        [
            ("ejkernel", ("softmax", DOCUMENTS, BOTH, "ejkernel auto", "milliseconds")),
            ("fa4-jax, varlen", ("softmax", DOCUMENTS, BOTH, "fa4-jax", "milliseconds")),
            (
                "cuDNN with a mask",
                ("softmax", DOCUMENTS, BOTH, "cuDNN (jax.nn)", "milliseconds"),
            ),
        ],
    ),
    (
        "Decode from a cache in 8 bits",
        "32 sequences of 8192 keys, milliseconds: less is better",
        False,
        [
            (
                "ejkernel, float8",
                (
                    "paged",
                    f"{DECODE} float8_e5m2",
                    "forward",
                    "ejkernel triton",
                    "milliseconds",
                ),
            ),
            (
                "ejkernel, int8",
                ("paged", f"{DECODE} int8", "forward", "ejkernel triton", "milliseconds"),
            ),
            (
                "ejkernel, bfloat16",
                ("paged", DECODE, "forward", "ejkernel triton", "milliseconds"),
            ),
            (
                "cuDNN, no pages",
                ("paged", DECODE, "forward", "cuDNN, contiguous", "milliseconds"),
            ),
        ],
    ),
    (
        "Native sparse attention",
        "65536 tokens, 16 blocks of 64, with gradients, ms: less is better",
        False,
        [
            ("ejkernel", ("native_sparse", SPARSE, BOTH, "ejkernel triton", "milliseconds")),
            (
                "flash-linear-attention",
                ("native_sparse", SPARSE, BOTH, "flash-linear-attention", "milliseconds"),
            ),
        ],
    ),
    (
        "Gated linear attention",
        "16384 tokens, with gradients, milliseconds: less is better",
        False,
        [("ejkernel", 1.279), ("jax-linear-attention", 2.102)],
    ),
)


def measured(where: tuple[str, str, str, str, str] | float) -> float:
    if isinstance(where, float):
        return where
    name, case, what, contender, field = where
    results = json.loads((RESULTS / f"{name}_nvidia_h200.json").read_text())["results"]
    (found,) = [
        r for r in results if (r["case"], r["what"], r["contender"]) == (case, what, contender)
    ]
    return found[field]


def text(
    x: float,
    y: float,
    size: int,
    words: str,
    *,
    fill: str = INK,
    weight: int = 400,
    anchor: str = "start",
) -> str:
    style = f'font-size="{size}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'


def drawn() -> str:
    y, parts = 36.0, [text(LEFT, 36, 22, "One NVIDIA H200, bfloat16", weight=700)]
    for title, unit, _, bars in PANELS:
        y += GAP
        parts += [
            text(LEFT, y, 19, title, weight=600),
            text(LEFT, y + 20, 14, unit, fill=FAINT),
        ]
        y += 30
        values = [measured(where) for _, where in bars]
        for (name, _), value in zip(bars, values, strict=True):
            width = max(3.0, value / max(values) * (WIDTH - 2 * LEFT - 64))
            colour = OURS if name.startswith("ejkernel") else PEERS
            parts.append(
                f'<rect x="{LEFT}" y="{y:.0f}" width="{width:.0f}" height="{BAR}" rx="3" fill="{colour}"/>'
            )
            parts.append(text(LEFT + width + 6, y + 18, 16, f"{value:.3g}", weight=600))
            wide = 9.0 * len(name) + 12 < width
            if wide:
                fill = "#ffffff" if colour == OURS else INK
                parts.append(text(LEFT + 8, y + 18, 16, name, fill=fill))
            else:
                parts.append(text(LEFT + width + 62, y + 18, 16, name))
            y += BAR + 5
    height = y + 16
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="system-ui, sans-serif">'
    paper = f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, paper, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(drawn())
