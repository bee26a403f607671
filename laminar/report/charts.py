"""Charts as inline SVG. Colours are variables of the page's style, so that one file is light and dark."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from laminar.report.markup import Html, element

WIDTH, HEIGHT = 560.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 8.0, 26.0
POINTS_MAX = 600  # about one per pixel; the extremes of what lies between stay
LANES_WIDTH, LANE_HEIGHT, LANES_HEIGHT_MAX = 1150.0, 16.0, 900.0
COLOURS = 6  # --version-0 … of the style
Point = tuple[float, float]


class Series(NamedTuple):
    """A line."""

    label: str
    points: list[Point]


class Scale(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def lines(
    series: Sequence[Series], x_label: str, unit: str = "", band: Sequence[tuple[float, float, float]] = ()
) -> Html:
    """Lines over a common x axis; the y axis has 0 in it. `band`: (x, low, high) behind the first line."""
    series = [Series(each.label, [point for point in each.points if math.isfinite(point[1])]) for each in series]
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points] + [
        value for _, *ends in band for value in ends if math.isfinite(value)
    ]
    if not ys:
        return element("p", "nothing measured", class_="muted")
    low, high, ticks = axis(min(*ys, 0.0), max(*ys, 0.0))
    x = Scale(*_span(min(xs), max(xs)), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    shapes = [_band(band, x, y)] if band else []
    for number, each in enumerate(series):
        points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in thinned(each.points))
        shapes.append(element("polyline", points=points, class_=f"line c{number % COLOURS}"))
        if len(each.points) == 1:
            a, b = each.points[0]
            shapes.append(
                element("circle", cx=round(x.at(a), 1), cy=round(y.at(b), 1), r=2.5, class_=f"dot c{number % COLOURS}")
            )
    frame = [*_y_ticks(ticks, y), *_x_ticks(x, x_label)]
    told = "; ".join(f"{each.label}: {_ends(each.points)}" for each in series if each.points)
    return element("div", _svg(HEIGHT, *frame, *shapes, label=told), _legend([each.label for each in series], unit))


def bars(counts: Sequence[tuple[str, float]], x_label: str) -> Html:
    """One bar per name."""
    if not counts:
        return element("p", "nothing measured", class_="muted")
    low, high, ticks = axis(0.0, max(count for _, count in counts))
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    each = (WIDTH - LEFT - RIGHT) / len(counts)
    shapes = []
    for number, (name, count) in enumerate(counts):
        left, top = LEFT + number * each, y.at(count)
        shapes.append(
            element(
                "rect", element("title", f"{name}: {count:,.0f}"), x=round(left + 0.12 * each, 1), y=round(top, 1),
                width=round(0.76 * each, 1), height=round(HEIGHT - BOTTOM - top, 1), class_="fill c0",
            )
        )  # fmt: skip
        if number % math.ceil(len(counts) / 16) == 0:
            shapes.append(_text(left + each / 2, HEIGHT - 12, name, "middle"))
    axis_label = _text((LEFT + WIDTH) / 2, HEIGHT - 1, x_label, "middle")
    told = ", ".join(f"{name}: {count:,.0f}" for name, count in counts)
    return element("div", _svg(HEIGHT, *_y_ticks(ticks, y), *shapes, axis_label, label=told))


class Span(NamedTuple):
    """A piece of a lane. `shade`: which colour; -1 = none of a version's."""

    start: float
    end: float
    shade: int
    title: str


def lanes(rows: Sequence[tuple[str, list[Span]]], begin: float, end: float, x_label: str) -> Html:
    """A row per name, pieces over time."""
    if not rows or end <= begin:
        return element("p", "nothing measured", class_="muted")
    height = min(LANE_HEIGHT, LANES_HEIGHT_MAX / len(rows))
    bottom = TOP + height * len(rows)
    left = 92.0 if height >= 7 else 8.0
    x = Scale(begin, end, left, LANES_WIDTH - RIGHT)
    shapes = []
    for number, (name, spans) in enumerate(rows):
        top = TOP + number * height
        if height >= 7:
            shapes.append(_text(left - 6, top + 0.75 * height, name, "end"))
        for span in spans:
            start, stop = x.at(max(begin, span.start)), x.at(min(end, span.end))
            shapes.append(
                element(
                    "rect", element("title", f"{name}: {span.title}"), x=round(start, 2), y=round(top + 0.08 * height, 2),
                    width=round(max(0.4, stop - start), 2), height=round(0.84 * height, 2),
                    class_=f"fill c{span.shade % COLOURS}" if span.shade >= 0 else "work",
                )
            )  # fmt: skip
    told = f"{len(rows)} lanes over {x_label}, from {short(begin)} to {short(end)}"
    return element("div", _svg(bottom + BOTTOM, *_x_ticks(x, x_label, bottom), *shapes, width=LANES_WIDTH, label=told))


def parts(values: Sequence[tuple[str, float]], of: float) -> Html:
    """One small bar in named parts; `of` is the whole width."""
    shapes, at = [], 0.0
    for number, (_, value) in enumerate(values):
        width = 160.0 * max(0.0, value) / of if of > 0 else 0.0
        shapes.append(
            element("rect", x=round(at, 2), y=1, width=round(width, 2), height=8, class_=f"fill c{number % COLOURS}")
        )
        at += width
    told = ", ".join(f"{name}: {value:.2f}" for name, value in values)
    return element("svg", *shapes, viewBox="0 0 160 10", class_="parts", role="img", aria_label=told)


# ---- axes --------------------------------------------------------------------------------------------------


def axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """(lowest, highest, ticks) of an axis on which all values lie, at round numbers."""
    low, high = _span(low, high)
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, last * step, [number * step for number in range(first, last + 1)]


def _span(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    return (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)


def thinned(points: list[Point]) -> list[Point]:
    """At most about POINTS_MAX, the lowest and the highest of each part."""
    if len(points) <= POINTS_MAX:
        return points
    size = math.ceil(2 * len(points) / POINTS_MAX)
    found: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        found += sorted({low, high})
    return found


def _y_ticks(ticks: Iterable[float], y: Scale) -> list[Html]:
    found = []
    for tick in ticks:
        at = round(y.at(tick), 1)
        found.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        found.append(_text(LEFT - 6, at + 3.5, short(tick), "end"))
    return found


def _x_ticks(x: Scale, label: str, bottom: float = HEIGHT - BOTTOM) -> list[Html]:
    low, high, ticks = axis(x.low, x.high)
    del low, high
    inside = [tick for tick in ticks if x.low <= tick <= x.high]
    shown = [_text(x.at(tick), bottom + 13, short(tick), "middle") for tick in inside]
    return [*shown, _text((x.start + x.end) / 2, bottom + 25, label, "middle")]


def short(value: float) -> str:
    """A number on an axis."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str) -> Html:
    return element("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor)


def _band(band: Sequence[tuple[float, float, float]], x: Scale, y: Scale) -> Html:
    known = [each for each in band if all(map(math.isfinite, each))]
    upper = [f"{x.at(at):.1f},{y.at(high):.1f}" for at, _, high in known]
    lower = [f"{x.at(at):.1f},{y.at(low):.1f}" for at, low, _ in reversed(known)]
    return element("polygon", points=" ".join([*upper, *lower]), class_="band")


def _legend(labels: Sequence[str], unit: str) -> Html:
    keys = [
        element("span", element("i", class_=f"key c{number % COLOURS}"), label) for number, label in enumerate(labels)
    ]
    return element("p", *keys, element("span", unit, class_="muted") if unit else None, class_="legend")


def _ends(points: Sequence[Point]) -> str:
    (first, low), (last, high) = points[0], points[-1]
    return f"{short(low)} at {short(first)}, {short(high)} at {short(last)}"


def _svg(height: float, *shapes: Html, label: str, width: float = WIDTH) -> Html:
    """`label`: what it shows, for whoever does not see it."""
    return element("svg", *shapes, viewBox=f"0 0 {width:g} {height + 2:g}", role="img", aria_label=label)
