"""Put a page together: text that cannot act, tables, and figures that the page's one script draws from data.

A page is one HTML file that fetches nothing. Torch-free.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

COLOURS = 8
_LONG = re.compile(r"\S{16,}")
_BREAKS = re.compile(r"(?<=[/_=:-])(?=\w)|(?<=\.)(?=[A-Za-z_])")
UNSEEN = "<noscript><p>The curves are drawn by this page's script, which did not run.</p></noscript>"


class Html(str):
    """Text that is HTML already; every other text is escaped where it becomes part of an element."""


def element(name: str, *inside: str, **attributes: object) -> Html:
    """Return an element; ``class_`` is the attribute ``class``, and attributes of no value are left out.

    Long words of a text, such as paths and keys, may go on in the next line at a separator.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items() if value
    )
    body = (
        text
        if isinstance(text, Html)
        else "".join(
            "<wbr/>".join(map(escape, _BREAKS.split(word))) if _LONG.fullmatch(word) else escape(word)
            for word in re.split(r"(\s+)", text)
        )
        for text in inside
    )
    return Html(f"<{name}{given}>{''.join(body)}</{name}>")


def soft(text: str) -> Html:
    """Return a paragraph in the soft colour."""
    return element("p", text, class_="soft")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> Html:
    """Return a table, of this class of the style sheet.

    Where the page is narrow, each row becomes a block, and each cell has the title of its column beside it.
    """
    lines = (
        element("tr", *(element("td", cell, data_label=title) for title, cell in zip(head, row, strict=False)))
        for row in rows
    )
    titles = element("tr", *(element("th", title) for title in head))
    return element("table", element("thead", titles), element("tbody", *lines), class_=kind)


def tiles(rows: Iterable[tuple[str, str]]) -> Html:
    """Return figures with their names."""
    return element("dl", *(element("div", element("dt", name), element("dd", text)) for name, text in rows))


def folded(title: str, *inside: str) -> Html:
    """Return a section that a click opens."""
    return element("details", element("summary", title), *inside)


@dataclass(frozen=True)
class Axis:
    """An axis of a figure.

    Attributes:
        unit: stands beside the axis.
        form: how the script writes values: plain, count, bytes, GB, percent, seconds, or steps.
        from_zero: whether the axis begins at 0.
    """

    unit: str
    form: str = "plain"
    from_zero: bool = False


@dataclass(frozen=True)
class Curve:
    """A series of a figure.

    Attributes:
        points: (x, y); a y that is not finite is shown as a cross. Of bars (begin, end, lane).
        kind: line, area (on top of the areas before it), points, or bars.
        colour: number of the colour; None: the series' place in the figure.
        texts: what is said of each point or bar, in place of its values.
    """

    name: str
    points: Sequence[tuple[float, ...]]
    kind: str = "line"
    colour: int | None = None
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A figure that the script draws, with values under the pointer, a legend that hides curves, and a zoom.

    Attributes:
        marks: kind ("resume", "skipped") -> places of vertical lines.
        limits: (axis, value, text) of lines with a text.
        lanes: names of the lanes that bars lie in.
        says: the figure in a sentence, and ``inside`` as a table, for those who do not see it. Such a figure takes a
            line of the page for itself.
    """

    title: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis
    marks: Sequence[tuple[str, Sequence[float]]] = ()
    limits: Sequence[tuple[str, float, str]] = ()
    lanes: Sequence[str] = ()
    says: str = ""
    inside: str = ""

    def html(self, number: int) -> Html:
        """Return the frame that the script draws the figure of this number of the page into."""
        words = [element("p", self.says), folded("As a table", self.inside)] if self.says else []
        label = {"role": "img", "aria_label": self.says or self.title, "data_figure": f"{number}"}
        frame = element("div", class_="drawing", **label)
        return element("figure", element("figcaption", self.title), frame, *words, class_="wide" * bool(self.says))

    def data(self) -> dict[str, Any]:
        """Return what the script draws, as JSON values; numbers that are not finite are null."""
        curves = [
            {
                "name": curve.name,
                "kind": curve.kind,
                "colour": (place if curve.colour is None else curve.colour) % COLOURS,
                "at": [point[0] for point in curve.points],
                "values": [point[1] if math.isfinite(point[1]) else None for point in curve.points],
                **({"lanes": [point[2] for point in curve.points]} if curve.kind == "bars" else {}),
                **({"texts": list(curve.texts)} if curve.texts else {}),
            }
            for place, curve in enumerate(self.curves)
        ]
        rest = {"marks": self.marks, "limits": self.limits, "lanes": self.lanes}
        return {"title": self.title, "x": vars(self.x), "y": vars(self.y), "curves": curves, **rest}


def document(title: str, sections: Iterable[str | Figure | Sequence[Figure]], refresh: int = 0) -> str:
    """Return a page as text.

    Args:
        title: of the window, without the product's name.
        sections: in order; figures in one sequence stand beside each other.
        refresh: seconds after which a browser reads the file again; 0: never.
    """
    figures: list[Figure] = []
    body: list[str] = []
    for section in sections:
        if isinstance(section, str):
            body.append(section)
            continue
        group = [section] if isinstance(section, Figure) else section
        frames = [figure.html(number) for number, figure in enumerate(group, len(figures))]
        figures += group
        body.append(frames[0] if isinstance(section, Figure) else element("div", *frames, class_="charts"))
    folder = resources.files(__package__ or "")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # by these hashes the browser accepts the two texts, but nothing that came with the data
    own = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{own[0]}'; script-src 'sha256-{own[1]}'"
    # "<" would end the script element; the rest is JSON as it stands
    data = json.dumps([figure.data() for figure in figures], allow_nan=False).replace("<", "\\u003c")
    again = f'<meta http-equiv="refresh" content="{refresh}"/>\n' if refresh else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}"/>\n{again}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<title>{escape(title)} · meshwright'
        f'</title>\n<link rel="icon" href="data:,"/>\n<style>{style}</style>\n</head>\n<body>\n{chr(10).join(body)}\n'
        f'{UNSEEN}<div id="tip" hidden=""></div><script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
