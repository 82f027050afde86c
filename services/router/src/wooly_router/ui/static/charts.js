// Line charts over time, in SVG. Small on purpose: a few hundred points per line, a line per device.

import { h, svg, uid } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 168;
const PAD = { left: 54, right: 10, top: 10, bottom: 22 };
/** If there are more lines than this, the chart shows their mean, and a band from minimum to maximum. */
export const LINES = 6;

/** Combine many lines: mean, minimum and maximum at each time. The lines' times differ, so their points are grouped in bins. */
function merged(series, from, to) {
  const bins = 240;
  const sums = new Map();
  for (const { points } of series) {
    for (const [t, v] of points) {
      if (t < from || v === null) continue;
      const bin = Math.floor(((t - from) / (to - from)) * bins);
      const at = sums.get(bin) ?? { n: 0, sum: 0, low: Infinity, high: -Infinity };
      at.n += 1;
      at.sum += v;
      at.low = Math.min(at.low, v);
      at.high = Math.max(at.high, v);
      sums.set(bin, at);
    }
  }
  return [...sums.entries()]
    .sort((a, b) => a[0] - b[0])
    .map(([bin, s]) => [from + ((bin + 0.5) / bins) * (to - from), s.sum / s.n, s.low, s.high]);
}

const last = (points) => points.findLast(([, v]) => v !== null)?.[1] ?? null;

/**
 * A chart. `show(value)` makes text of a value, `top(series)` the upper end of the axis. `noun` names what a line stands for;
 * `counts`: the lines count different things, so a mean makes no sense.
 * `set(series, from, to, gap)`: series are [{name, points: [[seconds, value or null]…]}], oldest first; a line is interrupted
 * where it has no point for more than `gap` seconds.
 */
export class TimeChart {
  #series = [];
  #from = 0;
  #to = 1;
  #gap = 60;
  #width = 480;
  #cursor = null;

  constructor(title, { show, top, noun = "device", counts = false }) {
    this.title = title;
    this.show = show;
    this.top = top;
    this.noun = noun;
    this.counts = counts;
    const id = uid("chart");
    this.svg = svg("svg", {
      class: "chart",
      role: "img",
      tabindex: 0,
      height: HEIGHT,
      onpointermove: (event) => this.#point(event),
      onpointerleave: () => this.#at(null),
      onblur: () => this.#at(null),
      onkeydown: (event) => this.#key(event),
    });
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    this.legend = h("tbody", {});
    this.node = h(
      "figure",
      { class: "card figure", "aria-labelledby": id },
      h("figcaption", { id }, title),
      h("div", { class: "plot" }, this.svg, this.tip),
      h(
        "table",
        { class: "legend" },
        h("caption", { class: "sr" }, `${title} in numbers`),
        h("thead", {}, h("tr", {}, [noun, "now", counts ? "min" : "mean", "max"].map((c) => h("th", { scope: "col" }, c)))),
        this.legend,
      ),
    );
    this.observer = new ResizeObserver(([entry]) => {
      this.#width = Math.max(220, entry.contentRect.width);
      this.#draw();
    });
    this.observer.observe(this.svg);
  }

  set(series, from, to, gap) {
    [this.#series, this.#from, this.#to, this.#gap] = [series, from, to, gap];
    this.#draw();
    this.#legend();
  }

  stop() {
    this.observer.disconnect();
  }

  #x(t) {
    return PAD.left + ((t - this.#from) / (this.#to - this.#from)) * (this.#width - PAD.left - PAD.right);
  }

  #y(v, top) {
    return HEIGHT - PAD.bottom - (v / top) * (HEIGHT - PAD.top - PAD.bottom);
  }

  #draw() {
    const top = this.top(this.#series) || 1;
    const parts = [];
    for (let i = 0; i <= 4; i++) {
      const y = this.#y((top * i) / 4, top);
      parts.push(svg("line", { class: "grid", x1: PAD.left, x2: this.#width - PAD.right, y1: y, y2: y }));
      if (i % 2 === 0) {
        parts.push(svg("text", { class: "tick", x: PAD.left - 6, y: y + 4, "text-anchor": "end" }, this.show((top * i) / 4)));
      }
    }
    const spans = this.#width < 340 ? 2 : 4;
    for (let i = 0; i <= spans; i++) {
      const t = this.#from + ((this.#to - this.#from) * i) / spans;
      const anchor = i === 0 ? "start" : i === spans ? "end" : "middle";
      const text = clock(t, this.#to - this.#from < 1200).slice(-11);
      parts.push(svg("text", { class: "tick", x: this.#x(t), y: HEIGHT - 6, "text-anchor": anchor }, text));
    }
    const many = this.#series.length > LINES;
    if (many) {
      const points = merged(this.#series, this.#from, this.#to);
      const high = points.map(([t, , , hi]) => `${this.#x(t).toFixed(1)},${this.#y(hi, top).toFixed(1)}`);
      const low = points.map(([t, , lo]) => `${this.#x(t).toFixed(1)},${this.#y(lo, top).toFixed(1)}`).reverse();
      parts.push(svg("polygon", { class: "band s0", points: [...high, ...low].join(" ") }));
      parts.push(svg("path", { class: "line s0", d: this.#path(points, top) }));
    } else {
      this.#series.forEach(({ points }, i) => {
        const seen = points.filter(([t]) => t >= this.#from - this.#gap);
        if (this.#series.length === 1) parts.push(svg("path", { class: "area s0", d: this.#path(seen, top, true) }));
        parts.push(svg("path", { class: `line s${i}`, d: this.#path(seen, top) }));
      });
    }
    if (!this.#series.some(({ points }) => points.length)) {
      parts.push(
        svg("text", { class: "nothing", x: this.#width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no data in this time span"),
      );
    }
    if (this.#cursor !== null) {
      const x = this.#x(this.#cursor);
      parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    const now = this.#series.map((s) => last(s.points)).filter((v) => v !== null);
    const mean = now.length ? now.reduce((a, b) => a + b, 0) / now.length : null;
    const each = () => this.#series.map((s) => `${this.show(last(s.points) ?? 0)} ${s.name}`).join(", ");
    const whole = now.length > 1 ? ` on average of ${now.length} ${this.noun}s` : "";
    const says = mean === null ? "no data" : this.counts ? `now ${each()}` : `now ${this.show(mean)}${whole}`;
    this.svg.setAttribute("aria-label", `${this.title}: ${says}. Arrow keys select single points.`);
  }

  /** A path through points. A new segment begins after a missing value or a gap. */
  #path(points, top, area = false) {
    const runs = [];
    let before = null;
    for (const [t, v] of points) {
      if (v === null) {
        before = null;
        continue;
      }
      if (before === null || t - before > this.#gap) runs.push([]);
      runs.at(-1).push([this.#x(Math.max(t, this.#from)), this.#y(Math.min(v, top), top)]);
      before = t;
    }
    const base = this.#y(0, top);
    return runs
      .map((run) => {
        const d = run.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
        if (run.length === 1) return area ? "" : `${d}h.5`;
        return area ? `${d}L${run.at(-1)[0].toFixed(1)} ${base}L${run[0][0].toFixed(1)} ${base}Z` : d;
      })
      .join("");
  }

  #legend() {
    const row = (name, values, mark) => {
      const known = values.filter((v) => v !== null);
      const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, h("span", { class: `swatch ${mark}`, "aria-hidden": "true" }), name),
        h("td", {}, known.length ? this.show(values.findLast((v) => v !== null)) : "–"),
        h("td", {}, mean === null ? "–" : this.show(this.counts ? known.reduce((a, b) => Math.min(a, b)) : mean)),
        h("td", {}, known.length ? this.show(known.reduce((a, b) => Math.max(a, b))) : "–"),
      );
    };
    const inside = (points) => points.filter(([t]) => t >= this.#from).map(([, v]) => v);
    if (this.#series.length > LINES) {
      const all = merged(this.#series, this.#from, this.#to);
      this.legend.replaceChildren(row(`mean of ${this.#series.length} ${this.noun}s, minimum to maximum`, all.map(([, v]) => v), "s0"));
    } else {
      this.legend.replaceChildren(...this.#series.map((s, i) => row(s.name, inside(s.points), `s${i}`)));
    }
  }

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.#width;
    const share = (x - PAD.left) / (this.#width - PAD.left - PAD.right);
    this.#at(share < 0 || share > 1 ? null : this.#from + share * (this.#to - this.#from));
  }

  #key(event) {
    const step = (this.#to - this.#from) / 40;
    const at = this.#cursor ?? this.#to;
    if (event.key === "ArrowLeft") this.#at(Math.max(this.#from, at - step));
    else if (event.key === "ArrowRight") this.#at(Math.min(this.#to, at + step));
    else if (event.key === "Escape") this.#at(null);
    else return;
    event.preventDefault();
  }

  #at(t) {
    this.#cursor = t;
    this.tip.hidden = t === null;
    if (t !== null) {
      const near = (points) => {
        if (this.counts) return points.findLast(([at]) => at <= t)?.[1] ?? null; // a count is valid until the next one
        const found = points.reduce((a, b) => (a && Math.abs(a[0] - t) <= Math.abs(b[0] - t) ? a : b), null);
        return found && Math.abs(found[0] - t) <= this.#gap ? found[1] : null;
      };
      const shown =
        this.#series.length > LINES
          ? [["mean", near(merged(this.#series, this.#from, this.#to))]]
          : this.#series.map((s) => [s.name, near(s.points)]);
      this.tip.replaceChildren(
        h("strong", {}, clock(t)),
        ...shown.map(([name, v], i) =>
          h("div", {}, h("span", { class: `swatch s${i}`, "aria-hidden": "true" }), `${name} ${v === null ? "–" : this.show(v)}`),
        ),
      );
      const share = this.#x(t) / this.#width;
      this.tip.style.setProperty("left", share < 0.55 ? `calc(${100 * share}% + 12px)` : "auto");
      this.tip.style.setProperty("right", share < 0.55 ? "auto" : `calc(${100 * (1 - share)}% + 12px)`);
    }
    this.#draw();
  }
}
