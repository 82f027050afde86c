// The dashboard: current numbers, charts, devices, the latest tasks.

import { api, refresher } from "../api.js";
import { TimeChart } from "../charts.js";
import { card, chip, h, meter, swap, table, toast } from "../dom.js";
import { bytes, clock, count, percent } from "../format.js";

const RANGES = [
  [60, "1 min"],
  [300, "5 min"],
  [3600, "1 h"],
  [21600, "6 h"],
  [86400, "24 h"],
  [604800, "7 d"],
];
/** Interval, in seconds, of the controller's samples. */
const SAMPLE_S = 10;
/** Maximum number of samples in one answer. */
const SAMPLES = 10000;
const DEVICES = 50;

/** The next larger size that is a round number, as are its quarters. */
function above(n) {
  let top = 1 << 20;
  while (top < n) top *= 2;
  return top * 0.75 >= n ? top * 0.75 : top;
}

/** The upper end of an axis for counts; its middle is a whole number, too. */
function evenly(n) {
  let top = 4;
  while (top < n) top *= 2;
  return top;
}

export default function dashboard({ body, head, live, can }) {
  const tiles = h("div", { class: "tiles" });
  const devices = h("div", {});
  const latest = h("div", {});
  const most = (series) => series.reduce((a, s) => s.points.reduce((b, [, v]) => Math.max(b, v ?? 0), a), 0);
  const charts = {
    utilization: new TimeChart("Utilization", { show: percent, top: () => 1 }),
    starvation: new TimeChart("Starvation", { show: percent, top: (s) => [0.1, 0.5].find((top) => most(s) <= top) ?? 1 }),
    memory: new TimeChart("VRAM used", { show: bytes, top: (s) => above(most(s)) }),
  };
  const counted = (title) => new TimeChart(title, { show: (n) => count(Math.round(n)), top: (s) => evenly(most(s)), noun: "kind", counts: true });
  const tasksChart = counted("Tasks");
  const nodesChart = counted("Nodes");
  let range = Number(sessionStorage.getItem("wooly.range")) || 300;
  let seen = new Map(); // executor -> [{t, utilization, starvation, memory}]
  let counts = []; // task counts: [{at, waiting, running}]
  let alive = []; // nodes and devices that are alive: [{at, nodes, devices}]
  let overview = null;
  let ahead = 0; // offset of the controller's clock from ours, in seconds

  const choose = h(
    "select",
    {
      "aria-label": "Span of the charts",
      onchange() {
        range = Number(choose.value);
        sessionStorage.setItem("wooly.range", range);
        history();
      },
    },
    RANGES.map(([seconds, name]) => h("option", { value: seconds, selected: seconds === range }, name)),
  );
  if (can("metrics:read")) head.append(choose);

  const now = () => Date.now() / 1000 + ahead;

  function add(executor, t, utilization, starvation, memory) {
    if (!seen.has(executor)) seen.set(executor, []);
    const points = seen.get(executor);
    const before = points.at(-1);
    const point = { t, utilization, starvation, memory };
    // In a long time span, live values replace the last point until it is far enough from the point before.
    if (points.length > 1 && before.live && t - points.at(-2).t < range / 400) points[points.length - 1] = { ...point, live: true };
    else if (!before || t > before.t) points.push({ ...point, live: true });
    while (points.length && points[0].t < t - range * 1.1) points.shift();
  }

  function draw() {
    const to = now();
    const names = [...seen.keys()].sort();
    const gap = Math.max(3.5 * SAMPLE_S, range / 60);
    for (const [key, chart] of Object.entries(charts)) {
      chart.set(names.map((name) => ({ name, points: seen.get(name).map((p) => [p.t, p[key]]) })), to - range, to, gap);
    }
    lines(tasksChart, counts, ["running", "waiting"], to);
    lines(nodesChart, alive, ["nodes", "devices"], to);
  }

  /** Lines of counts over time. Counts that are only sent when they change are extended to the present. */
  function lines(chart, points, names, to) {
    while (points.length > 1 && points[1].at < to - range) points.shift();
    const ends = points.length ? [...points, { ...points.at(-1), at: to }] : [];
    chart.set(names.map((name) => ({ name, points: ends.map((p) => [p.at, p[name]]) })), to - range, to, Infinity);
  }

  function living(at, gpus) {
    const point = { at, nodes: new Set(gpus.map((g) => g.node_id)).size, devices: gpus.length };
    const before = alive.at(-1);
    if (before && before.nodes === point.nodes && before.devices === point.devices) return;
    if (before) alive.push({ ...before, at });
    alive.push(point);
  }

  const history = refresher(async () => {
    if (can("tasks:read")) {
      const from = now() - range;
      const told = await api.get(["metrics", "tasks"], { since: from, step: Math.max(1, Math.round(range / 300)) });
      if (history.stopped()) return;
      counts = told.counts;
      draw();
    }
    if (!can("metrics:read")) return;
    const from = now() - range;
    const known = Math.max(1, overview?.gpus.length ?? 1);
    const step = Math.max(SAMPLE_S, Math.ceil(range / 300), Math.ceil((range * known) / (0.9 * SAMPLES)));
    const { samples } = await api.get(["metrics", "history"], { since: from, step: step > SAMPLE_S ? step : undefined });
    if (history.stopped()) return;
    const fresh = seen;
    seen = new Map();
    const at = Map.groupBy(samples, (s) => Math.round(s.at / Math.max(step, SAMPLE_S)));
    const live = alive.filter((p) => p.at > (samples.at(-1)?.at ?? 0));
    alive = [];
    for (const group of at.values()) living(group[0].at, [...new Map(group.map((s) => [s.executor_id, s])).values()]);
    alive.push(...live);
    // Live values take precedence: stored samples are ten seconds apart.
    const since = new Map([...fresh].map(([name, points]) => [name, points.find((p) => p.live)?.t ?? Infinity]));
    for (const s of samples) {
      if (s.at >= (since.get(s.executor_id) ?? Infinity)) continue;
      if (!seen.has(s.executor_id)) seen.set(s.executor_id, []);
      seen.get(s.executor_id).push({ t: s.at, utilization: s.utilization, starvation: s.starvation, memory: s.memory_used });
    }
    for (const [name, points] of fresh) {
      for (const p of points) if (p.live && p.t >= from) add(name, p.t, p.utilization, p.starvation, p.memory);
    }
    draw();
  }, problem);

  const look = refresher(async () => {
    overview = await api.get("overview");
    if (look.stopped()) return;
    ahead = overview.at - Date.now() / 1000;
    figures(overview.gpus);
    living(overview.at, overview.gpus);
    if (can("tasks:read")) {
      const { started = 0, pending = 0 } = overview.tasks;
      counts.push({ ...(counts.at(-1) ?? { running: started, waiting: pending }), at: overview.at }, { at: overview.at, running: started, waiting: pending });
      await tasks();
    }
    draw();
  }, problem);

  async function tasks() {
    const { tasks: found } = await api.get("tasks", { limit: 8 });
    swap(
      latest,
      card(
        "Latest tasks",
        table(
          "Latest tasks",
          ["task", "state", "class", { text: "tenant", class: "wider" }, { text: "since", class: "wider" }],
          found.map((t) => [
            h("a", { class: "short", title: t.name, href: `#/tasks/${encodeURIComponent(t.task_id)}`, "data-key": `task ${t.task_id}` }, t.name || t.task_id),
            chip(t.state, t.state),
            chip(`P${t.priority}`, `p${t.priority}`),
            t.tenant,
            h("span", { class: "num" }, clock(t.ended_at ?? t.started_at ?? t.created_at)),
          ]),
          "No tasks yet. Run one with wooly run script.py.",
        ),
        h("p", { class: "more" }, h("a", { href: "#/tasks" }, "All tasks")),
      ),
    );
  }

  function figures(gpus) {
    const sum = (key) => gpus.reduce((a, g) => a + (g[key] ?? 0), 0);
    const told = gpus.filter((g) => g.starvation !== null);
    const { nodes, tasks: states } = overview;
    const others = Object.entries(nodes).filter(([state]) => state !== "active");
    const tile = (name, value, note, href) =>
      h(
        href ? "a" : "div",
        { class: "tile", href, "data-key": `tile ${name}` },
        h("span", { class: "name" }, name),
        h("span", { class: "value" }, value),
        h("span", { class: "note" }, note),
      );
    swap(
      tiles,
      tile("Nodes", String(nodes.active ?? 0), others.map(([s, n]) => `${n} ${s}`).join(", ") || "all active", "#/nodes"),
      tile("Devices", String(gpus.length), `${sum("sessions")} sessions`, "#/nodes"),
      can("tasks:read") && tile("Running", String(states.started ?? 0), `${states.completed ?? 0} completed`, "#/tasks?state=started"),
      can("tasks:read") && tile("Waiting", String(states.pending ?? 0), `${states.failed ?? 0} failed`, "#/tasks?state=pending"),
      tile("Utilization", gpus.length ? percent(sum("utilization") / gpus.length) : "–", "mean, last second"),
      tile("Starvation", told.length ? percent(sum("starvation") / told.length) : "–", told.length ? "busy while others wait" : "no scheduler answers"),
      tile("VRAM", bytes(sum("memory_used")), `of ${bytes(sum("memory_total"))}`),
    );
    swap(
      devices,
      card(
        "Devices",
        table(
          "Devices",
          ["device", "utilization", "starvation", "VRAM", { text: "sessions", class: "r wider" }],
          gpus.slice(0, DEVICES).map((g) => [
            [h("span", { class: "key-cell" }, g.executor_id), h("span", { class: "sub num" }, g.node_id)],
            meter(g.utilization, percent(g.utilization), `Utilization of ${g.executor_id}`),
            g.starvation === null ? "–" : meter(g.starvation, percent(g.starvation), `Starvation of ${g.executor_id}`),
            meter(g.memory_used / (g.memory_total || 1), bytes(g.memory_used), `VRAM of ${g.executor_id}`),
            String(g.sessions),
          ]),
          "No device is alive. Start an executor with wooly up.",
        ),
        gpus.length > DEVICES && h("p", { class: "more" }, h("a", { href: "#/nodes" }, `${gpus.length - DEVICES} more`)),
      ),
    );
  }

  function problem(error) {
    toast(error.message, "bad");
    setTimeout(() => look.stopped() || look(), 3000);
  }

  const shown = [...Object.values(charts), can("tasks:read") && tasksChart, nodesChart].filter(Boolean);
  swap(
    body,
    tiles,
    can("metrics:read")
      ? h("div", { class: "charts" }, shown.map((c) => c.node))
      : h("p", { class: "card" }, "The charts require the scope metrics:read, which this token does not have."),
    h("div", { class: "two" }, devices, latest),
  );
  draw();
  look();
  history();
  const off = [
    live.on("metrics", (data, name) => {
      if (name === "resync") return history();
      ahead = data.at - Date.now() / 1000;
      living(data.at, data.gpus);
      for (const g of data.gpus) add(g.executor_id, data.at, g.utilization, g.starvation, g.memory_used);
      if (overview !== null) figures((overview.gpus = data.gpus));
      draw();
    }),
    live.on(["tasks", "nodes"], look),
  ];
  const timer = can("metrics:read") ? null : setInterval(look, 5000);
  return {
    stop() {
      off.forEach((f) => f());
      clearInterval(timer);
      look.stop();
      history.stop();
      [...Object.values(charts), tasksChart, nodesChart].forEach((c) => c.stop());
    },
  };
}
