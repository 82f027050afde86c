// Nodes: their devices, the use of the devices' memory, and the state that an operator sets.

import { api, refresher } from "../api.js";
import { ask, chip, field, h, meter, swap, table, toast } from "../dom.js";
import { bytes, nanos, percent, plural, span, taskOf } from "../format.js";

const EVERY_MS = 3000;
/** Kinds of device memory, in drawing order: field of `MemoryState`, name. */
const KINDS = [
  ["own", "own to sessions"],
  ["contents", "shared contents"],
  ["slots", "rounding"],
  ["reserve", "reserve"],
  ["free", "free"],
];
const OWNERS = 7;

/** A bar with the parts of a whole: [{name, bytes, mark}]. A list below it has the same numbers. */
function stacked(label, parts, capacity) {
  const shown = parts.filter((p) => p.bytes > 0);
  return h(
    "div",
    { class: "stacked" },
    h("span", { class: "name", "aria-hidden": "true" }, label),
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      shown.map((p) => h("span", { class: p.mark, title: `${p.name}: ${bytes(p.bytes)}`, style: { width: `${(100 * p.bytes) / Math.max(1, capacity)}%` } })),
    ),
    h(
      "ul",
      { class: "key", "aria-label": label },
      shown.map((p) => h("li", {}, h("span", { class: `swatch ${p.mark}`, "aria-hidden": "true" }), `${p.name} `, h("b", {}, bytes(p.bytes)))),
    ),
  );
}

/** Memory by session, with its tenant, the largest first; small sessions are combined. */
function owners(memory) {
  const held = new Map();
  for (const s of memory.sessions) {
    const name = s.session_id === "others" ? "other tenants" : s.tenant || "–";
    held.set(name, (held.get(name) ?? 0) + s.own + s.shared);
  }
  const sorted = [...held.entries()].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  const parts = sorted.slice(0, OWNERS - 1).map(([name, n], i) => ({ name, bytes: n, mark: `s${i}` }));
  const rest = sorted.slice(OWNERS - 1).reduce((a, [, n]) => a + n, 0);
  if (rest) parts.push({ name: `${sorted.length - OWNERS + 1} more`, bytes: rest, mark: "rest" });
  parts.push({ name: "unused", bytes: Math.max(0, memory.capacity - parts.reduce((a, p) => a + p.bytes, 0)), mark: "free" });
  return parts;
}

function memoryMap(gpu) {
  const memory = gpu.memory;
  if (memory === null) return h("p", { class: "hint" }, `${bytes(gpu.memory_used)} of ${bytes(gpu.device.total_memory)} are used; this executor does not report the owners.`);
  const kinds = KINDS.map(([key, name]) => ({ name, bytes: memory[key], mark: `kind-${key}` }));
  const promised = memory.fixed + memory.movable;
  const limit = memory.capacity * (1 + memory.overcommit_percent / 100);
  return [
    stacked("By kind", kinds, memory.capacity),
    stacked("By owner", owners(memory), memory.capacity),
    h(
      "p",
      { class: "hint" },
      `Promised ${bytes(promised)} of ${bytes(limit)}. `,
      memory.host + memory.disk > 0 || memory.swapped_out > 0
        ? `Swapped out: ${bytes(memory.host)} in host memory, ${bytes(memory.disk)} on disk; ${memory.swapped_out} times out, ${memory.swapped_in} times in.`
        : "Nothing is swapped out.",
    ),
  ];
}

function sessionsOf(gpu, figures) {
  const audited = new Map((figures?.sessions ?? []).map((s) => [s.session_id, s]));
  const held = new Map((gpu.memory?.sessions ?? []).map((s) => [s.session_id, s]));
  const ids = [...new Set([...held.keys(), ...audited.keys()])].sort();
  if (!ids.length) return h("p", { class: "hint" }, "No session is open on this device.");
  return table(
    `Sessions on ${gpu.executor_id}`,
    ["session", "tenant", "class", ...["share", "queue", "p99", "own", "shared", "swapped"].map((text) => ({ text, class: "r" }))],
    ids.map((id) => {
      const [m, a] = [held.get(id), audited.get(id)];
      return [
        id === "others" ? "other tenants'" : h("a", { href: `#/tasks/${encodeURIComponent(taskOf(id))}`, "data-key": `session ${gpu.executor_id} ${id}` }, id),
        (m ?? a).tenant || "–",
        a ? [chip(`P${a.policy.priority}`, `p${a.policy.priority}`), a.suspended && " suspended"] : "–",
        a ? percent(a.share_permille / 1000) : "–",
        a ? String(a.queued) : "–",
        a ? nanos(a.p99_ns) : "–",
        m ? bytes(m.own) : "–",
        m ? bytes(m.shared) : "–",
        m ? bytes(m.host + m.disk) : "–",
      ];
    }),
  );
}

export default function nodes({ body, live, can }) {
  const list = h("div", { class: "nodes" });
  const count = h("p", { class: "hint", role: "status" });
  const search = h("input", { type: "search", placeholder: "node, device or group", spellcheck: "false", oninput: () => draw() });
  const open = new Set(); // executors with visible sessions
  let found = [];
  let figures = new Map();
  let before = "";

  const look = refresher(async () => {
    const answer = await api.get("nodes");
    const told = can("metrics:read") ? await api.get(["metrics", "gpus"]).catch(() => ({ gpus: [] })) : { gpus: [] };
    if (look.stopped()) return;
    found = answer.nodes;
    figures = new Map(told.gpus.map((g) => [g.executor_id, g]));
    draw();
  }, (error) => toast(error.message, "bad"));

  async function wish(node, state) {
    try {
      await api.put(["nodes", node.node_id, "state"], { state });
      toast(`${node.node_id} is ${state} now`);
    } catch (error) {
      toast(error.message, "bad");
    }
    look();
  }

  function overcommit(node) {
    ask(`Overcommit of ${node.node_id}`, "Save", (form) => {
      const percentage = h("input", {
        type: "number",
        min: 0,
        max: 1000,
        value: node.overcommit_vram_percent ?? "",
        placeholder: `${node.effective_overcommit_vram_percent}, the cluster's`,
      });
      form.append(field("VRAM that may be promised beyond the capacity, in percent", percentage, "Empty: the cluster's setting. 0: none. Applies to new tasks only."));
      return async () => {
        const value = percentage.value === "" ? null : Number(percentage.value);
        await api.put(["nodes", node.node_id, "config"], { overcommit_vram_percent: value });
        toast(`${node.node_id}: overcommit is ${value === null ? "the cluster's" : `${value} %`} now`);
        look();
      };
    });
  }

  function device(gpu) {
    const audited = figures.get(gpu.executor_id);
    const shown = open.has(gpu.executor_id);
    const id = `sessions-${gpu.executor_id}`;
    const facts = [gpu.device.vendor, gpu.device.arch, plural(gpu.device.cores, "core"), bytes(gpu.device.total_memory), gpu.device.runtime];
    return h(
      "article",
      { class: "device", "aria-label": `Device ${gpu.executor_id}` },
      h(
        "header",
        {},
        h("h3", {}, gpu.executor_id, " ", h("span", { class: "hint" }, gpu.device.name)),
        gpu.state === "lost" && chip(`lost for ${span(gpu.age_s)}`, "lost"),
        h("span", { class: "hint" }, facts.filter(Boolean).join(" · ")),
      ),
      h(
        "div",
        { class: "meters" },
        h("span", {}, "Utilization ", meter(gpu.utilization, percent(gpu.utilization), "Utilization")),
        audited && h("span", {}, "Starvation ", meter(audited.starvation_permille / 1000, percent(audited.starvation_permille / 1000), "Starvation")),
        h("span", {}, "VRAM ", meter(gpu.memory_used / (gpu.device.total_memory || 1), bytes(gpu.memory_used), "VRAM")),
      ),
      audited?.violations > 0 && h("p", { class: "problem" }, `${audited.violations} violations of the dispatch rule; the last: ${audited.last_violation}`),
      memoryMap(gpu),
      h(
        "button",
        {
          type: "button",
          class: "expand",
          "aria-expanded": String(shown),
          "aria-controls": shown ? id : undefined,
          "data-key": `open ${gpu.executor_id}`,
          onclick() {
            shown ? open.delete(gpu.executor_id) : open.add(gpu.executor_id);
            draw();
          },
        },
        h("span", { class: "arrow", "aria-hidden": "true" }),
        plural(gpu.sessions, "session"),
      ),
      shown && h("div", { id }, sessionsOf(gpu, audited)),
    );
  }

  function card(node) {
    const button = (text, state, kind) =>
      h("button", { type: "button", class: kind, "data-key": `${state} ${node.node_id}`, "aria-label": `${text} ${node.node_id}`, onclick: () => wish(node, state) }, text);
    const own = node.overcommit_vram_percent === null ? "the cluster's" : "its own";
    return h(
      "section",
      { class: "card node", "aria-label": `Node ${node.node_id}` },
      h(
        "header",
        {},
        h("h2", {}, node.node_id),
        chip(node.state, node.state),
        node.groups.map((g) => h("a", { class: "chip group", href: "#/groups" }, g)),
        h("span", { class: "hint" }, `${plural(node.tasks, "task")} · overcommit ${node.effective_overcommit_vram_percent} %, ${own}`),
        can("nodes:write") &&
          h(
            "span",
            { class: "actions" },
            node.wish !== "active" && button("Activate", "active"),
            node.wish !== "cordoned" && button("Cordon", "cordoned"),
            node.wish !== "draining" && button("Drain", "draining"),
            h("button", { type: "button", "data-key": `config ${node.node_id}`, "aria-label": `Overcommit of ${node.node_id}`, onclick: () => overcommit(node) }, "Overcommit…"),
          ),
      ),
      node.gpus.length ? node.gpus.map(device) : h("p", { class: "hint" }, "Its devices have sent no heartbeat recently."),
    );
  }

  function draw() {
    const text = search.value.trim().toLowerCase();
    const shown = found.filter((n) => !text || [n.node_id, ...n.groups, ...n.gpus.flatMap((g) => [g.executor_id, g.device.name])].some((s) => s.toLowerCase().includes(text)));
    const state = JSON.stringify([shown, [...figures], [...open]]);
    if (state === before) return; // nothing has changed, so do not disturb the reader
    before = state;
    count.textContent = `${plural(shown.length, "node")}, ${plural(shown.reduce((a, n) => a + n.gpus.length, 0), "device")}`;
    swap(list, shown.length ? shown.map(card) : h("p", { class: "card empty" }, "No node matches. Executors appear here when they send heartbeats."));
  }

  swap(body, h("search", { class: "filters" }, field("Search", search), count), list);
  look();
  const off = live.on("nodes", look);
  const timer = setInterval(look, EVERY_MS);
  return {
    stop() {
      off();
      clearInterval(timer);
      look.stop();
    },
  };
}
