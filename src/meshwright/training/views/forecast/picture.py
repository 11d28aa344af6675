"""Draw on SVG: axes of seconds and bytes, marks with their text, and figures with a text beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from meshwright.core.units import duration_text
from meshwright.training.views.page.charts import ChartAxis, nice
from meshwright.training.views.page.frame import legend

WIDTH, LEFT, RIGHT, TOP = 1200, 84, 24, 12


def seconds_axis(seconds: float) -> ChartAxis:
    """Return the axis of a step's time."""
    end = seconds or 1.0
    return ChartAxis(0.0, end, LEFT, WIDTH - RIGHT, ticks=nice(0.0, end, 8))


def seconds_ticks(x: ChartAxis, bottom: float) -> str:
    """Write the seconds under a picture."""
    return "".join(
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{bottom:.1f}"/>'
        f'<text class="step" x="{x(tick):.1f}" y="{bottom + 15:.1f}">{escape(duration_text(tick))}</text>'
        for tick in x.ticks
    )


def gigabytes(size: float) -> str:
    """Format 10⁹ bytes as the command prints them."""
    return f"{size / 1e9:.1f} GB"


def title(text: str) -> str:
    """Return an element's text, which a browser shows under the pointer and a screen reader reads."""
    return f"<title>{escape(text)}</title>"


def figure(
    caption: str,
    says: str,
    names: Iterable[tuple[int, str]],
    size: tuple[float, float],
    parts: Sequence[str],
    text: str,
) -> str:
    """Return a figure as HTML.

    Args:
        says: the picture in a sentence, for those who do not see it.
        names: (number of the colour, name) for the legend.
        size: width and height of the picture.
        text: the same as a table, as HTML.
    """
    return (
        f'<figure class="wide"><figcaption>{escape(caption)}</figcaption>{legend(names)}'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" role="img"'
        f' aria-label="{escape(says)}">{title(says)}{"".join(parts)}</svg>'
        f"<p>{escape(says)}</p><details><summary>As a table</summary>{text}</details></figure>"
    )
