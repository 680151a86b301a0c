"""SVG plots without a plotting library: time over batch, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence

Series = dict[str, list[tuple[float, float]]]
COLOURS = ("#1f6feb", "#d1242f", "#6e7781", "#9a6700", "#1a7f37")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 60, 34, 14, 46


def _ticks(low: float, high: float, base: float) -> list[float]:
    first = math.floor(math.log(low, base) + 1e-9)
    return [base**e for e in range(first, math.ceil(math.log(high, base) - 1e-9) + 1)]


def loglog(title: str, x_name: str, y_name: str, series: Series, base: float = 2.0, lines: Sequence[str] = ()) -> str:
    """Return a log-log plot; series named in `lines` are drawn without marks."""
    points = [p for line in series.values() for p in line]
    xs, ys = _ticks(min(p[0] for p in points), max(p[0] for p in points), base), [p[1] for p in points]
    y_ticks = _ticks(min(ys), max(ys), 2.0 if max(ys) / min(ys) < 200 else 10.0)

    def at(x: float, y: float) -> tuple[float, float]:
        along = (math.log(x) - math.log(xs[0])) / max(1e-9, math.log(xs[-1]) - math.log(xs[0]))
        up = (math.log(y) - math.log(y_ticks[0])) / max(1e-9, math.log(y_ticks[-1]) - math.log(y_ticks[0]))
        return LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">{y_name}</text>',
    ]
    for x in xs:
        px, _ = at(x, y_ticks[0])
        out.append(f'<line x1="{px:.1f}" y1="{TOP}" x2="{px:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for y in y_ticks:
        _, py = at(xs[0], y)
        out.append(f'<line x1="{LEFT}" y1="{py:.1f}" x2="{WIDTH - RIGHT}" y2="{py:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    for index, (name, line) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        pixels = [at(x, y) for x, y in sorted(line)]
        if name in lines or x_name.startswith(("tokens", "scores")):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if name not in lines:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in pixels]
        out.append(f'<rect x="{LEFT + 10}" y="{TOP + 6 + 17 * index}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 26}" y="{TOP + 15 + 17 * index}">{name}</text>')
    return "\n".join([*out, "</svg>\n"])
