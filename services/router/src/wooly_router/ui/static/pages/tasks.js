// Sessions and jobs: search and filters; each task with its story and the reasons for its placement.

import { api, refresher } from "../api.js";
import { ask, chip, field, h, swap, table, toast } from "../dom.js";
import { bytes, clock, plural, span } from "../format.js";

const STATES = ["pending", "started", "hibernated", "completed", "failed", "cancelled"];
const ENDED = ["completed", "failed", "cancelled"];
const PAGE = 50;

/** Names of the parts of a placement's cost. */
const PARTS = {
  sessions: "sessions",
  utilization: "utilization",
  starvation: "starvation",
  promised: "memory promised",
  resident: "weights there",
  cost: "sum",
};

function whyHere(placement) {
  if (placement.why === "here") {
    const names = Object.keys(placement.here);
    const used = Object.keys(PARTS).filter((p) => names.some((n) => placement.here[n][p] !== undefined));
    const next = placement.next_best;
    return [
      h("h3", {}, "Why here"),
      h(
        "table",
        { class: "small" },
        h("caption", { class: "sr" }, "Points of the chosen devices"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "device"), used.map((p) => h("th", { scope: "col", class: "r" }, PARTS[p])))),
        h(
          "tbody",
          {},
          names.map((n) => h("tr", {}, h("th", { scope: "row" }, n), used.map((p) => h("td", { class: "r" }, String(placement.here[n][p] ?? 0))))),
        ),
      ),
      h("p", { class: "hint" }, used.length === 1 ? "Idle devices have no points. " : "", "The lowest number of points wins. ", next ? `Next best: ${next.executor_id} with ${next.cost}.` : "No other device fits."),
    ];
  }
  if (placement.why === "waiting") {
    return [
      h("h3", {}, "Why waiting"),
      placement.fitting > 0 && h("p", {}, `${placement.fitting} devices fit, which is not enough.`),
      h("ul", { class: "plain" }, Object.entries(placement.waits ?? {}).map(([n, why]) => h("li", {}, h("strong", {}, n), ` ${why}`))),
      !Object.keys(placement.waits ?? {}).length && h("p", { class: "hint" }, "No device is alive."),
    ];
  }
  return [h("h3", {}, "Why here"), h("p", { class: "hint" }, "The task has not been placed yet.")];
}

function story(steps) {
  return [
    h("h3", {}, "Story"),
    h(
      "ol",
      { class: "story" },
      steps.map((s, i) =>
        h(
          "li",
          {},
          h("time", { datetime: new Date(s.at * 1000).toISOString() }, clock(s.at)),
          chip(s.state, s.state),
          h("span", {}, s.reason || (s.state === "pending" ? "requested" : "")),
          i > 0 && h("span", { class: "hint" }, ` +${span(s.at - steps[i - 1].at)}`),
        ),
      ),
    ),
  ];
}

/** A task with its story. If it has ranks: also their devices and the figures of these devices, by executor. */
async function read(id, can) {
  const reply = await api.get(["tasks", id]);
  if (!reply.ranks.length) return reply;
  const [nodes, told] = await Promise.all([
    api.get("nodes").catch(() => ({ nodes: [] })),
    can("metrics:read") ? api.get(["metrics", "gpus"]).catch(() => ({ gpus: [] })) : { gpus: [] },
  ]);
  reply.devices = new Map(nodes.nodes.flatMap((n) => n.gpus).map((g) => [g.executor_id, g]));
  reply.figures = new Map(told.gpus.map((g) => [g.executor_id, g]));
  return reply;
}

/** The ranks of a program: where each one is, and what it uses. The cores are those of the last ten seconds. */
function ranks(reply) {
  const right = (text) => ({ text, class: "r" });
  const rows = reply.ranks.map((rank) => {
    const found = (by) => rank.executors.flatMap((name) => (by.get(name) ? [[by.get(name), name]] : []));
    const used = found(reply.figures).map(([figures, name]) => {
      const share = figures.sessions.find((s) => s.session_id === rank.task_id)?.share_permille;
      const cores = reply.devices.get(name)?.device.cores;
      return share === undefined || cores === undefined ? null : (cores * share * figures.utilization_permille) / 1e6;
    });
    const memory = found(reply.devices).flatMap(([gpu]) => (gpu.memory?.sessions ?? []).filter((s) => s.session_id === rank.task_id));
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    return [
      String(rank.rank),
      rank.executors.map((name) => `${name}${reply.devices.get(name) ? ` (${reply.devices.get(name).device.name})` : ""}`).join(", ") || "–",
      chip(rank.state, rank.state),
      used.length && !used.includes(null) ? sum(used).toFixed(1) : "–",
      memory.length ? bytes(sum(memory.map((s) => s.own + s.shared))) : "–",
      memory.length ? bytes(sum(memory.map((s) => s.host + s.disk))) : "–",
    ];
  });
  return [h("h3", {}, "Ranks"), table(`Ranks of ${reply.task.task_id}`, ["rank", "device", "state", ...["cores", "memory", "swapped"].map(right)], rows)];
}

export default function tasks({ body, live, can, rest, query }) {
  const chosen = {
    state: new Set(query.getAll("state").filter((s) => STATES.includes(s))),
    priority: query.get("priority") ?? "",
    kind: query.get("kind") ?? "",
    text: query.get("text") ?? rest[0] ?? "",
  };
  const open = new Map(); // details by task id; null while they are loaded
  if (rest[0]) open.set(rest[0], null);
  let list = [];
  let next = "";
  let pages = 1;

  const rows = h("div", {});
  const found = h("p", { class: "hint", role: "status" });
  const search = h("input", {
    type: "search",
    value: chosen.text,
    placeholder: "name or id",
    spellcheck: "false",
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => change({ text: search.value.trim() }), 250);
    },
  });
  let typing = 0;
  const select = (name, options) =>
    h(
      "select",
      { onchange: (event) => change({ [name]: event.target.value }) },
      options.map(([value, text]) => h("option", { value, selected: chosen[name] === value }, text)),
    );
  const states = h(
    "fieldset",
    { class: "choices" },
    h("legend", {}, "State"),
    STATES.map((state) => {
      const box = h("input", {
        type: "checkbox",
        checked: chosen.state.has(state),
        onchange() {
          box.checked ? chosen.state.add(state) : chosen.state.delete(state);
          change({});
        },
      });
      return h("label", {}, box, chip(state, state));
    }),
  );

  function change(what) {
    Object.assign(chosen, what);
    pages = 1;
    const kept = new URLSearchParams();
    for (const s of chosen.state) kept.append("state", s);
    for (const name of ["priority", "kind", "text"]) if (chosen[name]) kept.set(name, chosen[name]);
    history.replaceState(null, "", `#/tasks${kept.size ? `?${kept}` : ""}`);
    look();
  }

  const look = refresher(async () => {
    let after = "";
    const all = [];
    for (let i = 0; i < pages; i++) {
      const answer = await api.get("tasks", {
        state: [...chosen.state],
        priority: chosen.priority,
        kind: chosen.kind,
        text: chosen.text,
        limit: PAGE,
        after,
      });
      all.push(...answer.tasks);
      after = answer.next;
      if (!after) break;
    }
    for (const id of open.keys()) {
      if (all.some((t) => t.task_id === id)) open.set(id, await read(id, can).catch(() => open.get(id)));
    }
    if (look.stopped()) return;
    [list, next] = [all, after];
    draw();
  }, (error) => toast(error.message, "bad"));

  async function toggle(id) {
    if (open.has(id)) {
      open.delete(id);
      draw();
      return;
    }
    open.set(id, null);
    draw();
    try {
      open.set(id, await read(id, can));
    } catch (error) {
      open.delete(id);
      toast(error.message, "bad");
    }
    if (!look.stopped()) draw();
  }

  function cancel(task) {
    ask(
      `Cancel ${task.name || task.task_id}?`,
      "Cancel the task",
      (form) => {
        const reason = h("input", { maxlength: 1000 });
        form.append(h("p", {}, "Unfinished work is lost."), field("Reason", reason, "It will appear in the task's story."));
        return async () => {
          await api.post(["tasks", task.task_id, "cancel"], { reason: reason.value });
          toast(`${task.name || task.task_id} is cancelled`);
          look();
        };
      },
      "danger",
    );
  }

  function move(task) {
    ask(`Move ${task.name || task.task_id}?`, "Move the session", (form) => {
      const node = h("input", { maxlength: 255 });
      form.append(
        h("p", {}, "Its script waits for a moment, and goes on at another device, from a checkpoint."),
        field("Node, executor, group or vendor", node, "Empty: the best other device."),
      );
      return async () => {
        await api.post(["tasks", task.task_id, "move"], { node: node.value });
        toast(`${task.name || task.task_id} is asked to move; its story says when it has`);
        reopen(task);
      };
    });
  }

  async function request(task, what, said) {
    try {
      await api.post(["tasks", task.task_id, what]);
      toast(`${task.name || task.task_id} ${said}`);
    } catch (error) {
      toast(error.message, "bad");
    }
    reopen(task);
  }

  /** Read the story of an opened task again. */
  async function reopen(task) {
    look();
    if (open.has(task.task_id)) {
      open.set(task.task_id, await read(task.task_id, can));
      if (!look.stopped()) draw();
    }
  }

  async function prioritize(task, priority) {
    try {
      await api.put(["tasks", task.task_id, "priority"], { priority: Number(priority) });
      toast(`${task.name || task.task_id} is now in class P${priority}`);
    } catch (error) {
      toast(error.message, "bad");
    }
    look();
  }

  function checkpoint(stored) {
    const written = stored.written < stored.nbytes ? `, of which ${bytes(stored.written)} were new` : "";
    return `${stored.number}, ${span(Date.now() / 1000 - stored.at)} ago: ${bytes(stored.nbytes)}${written}; its script waited ${stored.pause_s.toFixed(2)} s`;
  }

  function detail(task, reply) {
    const fact = (name, value) => value !== null && value !== "" && value !== undefined && h("div", {}, h("dt", {}, name), h("dd", {}, value));
    const asked = task.required_vram === null ? "as it comes" : bytes(task.required_vram);
    const classes = h(
      "select",
      { "data-key": `class ${task.task_id}`, onchange: (event) => prioritize(task, event.target.value) },
      [0, 1, 2, 3, 4].map((p) => h("option", { value: p, selected: p === task.priority }, `P${p}`)),
    );
    return h(
      "div",
      { class: "detail" },
      h(
        "dl",
        { class: "facts" },
        fact("id", h("code", {}, task.task_id)),
        fact("tenant", task.tenant),
        fact("asked from", task.client_host),
        fact("memory", `${asked}${task.noswap ? ", never swapped out" : ""}`),
        fact("devices", `${task.gpu_count}, ${task.gpu_mode}${task.node_groups.length ? `, in ${task.node_groups.join(" or ")}` : ""}`),
        fact("on", task.executors.join(", ")),
        task.kind === "job" && fact("attempt", String(task.attempt)),
        reply?.checkpoint && fact("checkpoint", checkpoint(reply.checkpoint)),
        fact("created", clock(task.created_at)),
        task.deadline_at !== null && fact("deadline", clock(task.deadline_at)),
      ),
      h(
        "div",
        { class: "two" },
        h("div", {}, reply === null ? h("p", { class: "hint" }, "Loading…") : story(reply.story)),
        h("div", {}, whyHere(task.placement)),
      ),
      reply?.ranks.length > 0 && ranks(reply),
      task.outputs.length > 0 && [
        h("h3", {}, "Results"),
        h("ul", { class: "plain" }, task.outputs.map((o) => h("li", {}, h("strong", {}, o.name), ` ${o.dtype} [${o.sizes.join(", ")}], ${bytes(o.nbytes)}`))),
      ],
      h(
        "div",
        { class: "actions" },
        h("a", { class: "button", href: `#/traces/of/${encodeURIComponent(task.task_id)}`, "data-key": `trace ${task.task_id}` }, "Trace"),
        can("tasks:write") && !ENDED.includes(task.state) && h("label", { class: "inline" }, "Class ", classes),
        can("tasks:write") &&
          task.kind === "session" &&
          task.state === "started" && [
            h("button", { type: "button", "data-key": `move ${task.task_id}`, onclick: () => move(task) }, "Move…"),
            h(
              "button",
              { type: "button", "data-key": `hibernate ${task.task_id}`, onclick: () => request(task, "hibernate", "is asked to hibernate") },
              "Hibernate",
            ),
          ],
        can("tasks:write") &&
          task.state === "hibernated" &&
          h("button", { type: "button", "data-key": `wake ${task.task_id}`, onclick: () => request(task, "wake", "is asked to wake up") }, "Wake"),
        can("tasks:write") &&
          !ENDED.includes(task.state) &&
          h("button", { type: "button", class: "danger", "data-key": `cancel ${task.task_id}`, onclick: () => cancel(task) }, "Cancel…"),
      ),
    );
  }

  function row(task) {
    const id = `task-${task.task_id}`;
    const shown = open.has(task.task_id);
    const lasted = task.started_at === null ? null : (task.ended_at ?? Date.now() / 1000) - task.started_at;
    const button = h(
      "button",
      {
        type: "button",
        class: "expand",
        "aria-expanded": String(shown),
        "aria-controls": shown ? id : undefined,
        "data-key": `open ${task.task_id}`,
        onclick: () => toggle(task.task_id),
      },
      h("span", { class: "arrow", "aria-hidden": "true" }),
      task.name || task.task_id,
    );
    const cells = [
      h("td", { class: "wide" }, button, h("span", { class: "sub" }, task.name ? task.task_id : "")),
      h("td", {}, chip(task.state, task.state)),
      h("td", {}, chip(`P${task.priority}`, `p${task.priority}`)),
      h("td", { class: "wider" }, task.kind),
      h("td", { class: "wider" }, task.tenant),
      h("td", { class: task.executors.length > 1 ? "wider" : "wider num" }, task.executors.join(", ") || "–"),
      h("td", { class: "num wider" }, clock(task.created_at)),
      h("td", { class: "r num" }, span(lasted)),
    ];
    const main = h("tr", { class: shown ? "opened" : undefined }, cells);
    if (!shown) return [main];
    const reply = open.get(task.task_id);
    return [main, h("tr", { class: "more" }, h("td", { colspan: cells.length, id }, detail(reply?.task ?? task, reply)))];
  }

  function draw() {
    found.textContent = list.length ? `${plural(list.length, "task")}${next ? " and more" : ""}, newest first` : "";
    const columns = ["task", "state", "class", ...["kind", "tenant", "on", "created"].map((text) => ({ text, class: "wider" })), { text: "ran", class: "r" }];
    const none = h("tr", {}, h("td", { colspan: columns.length, class: "empty" }, "No task matches."));
    swap(
      rows,
      h(
        "div",
        { class: "scroll", "data-scroll": "tasks", role: "region", "aria-label": "Tasks", tabindex: 0 },
        h(
          "table",
          { class: "tasks" },
          h("caption", { class: "sr" }, "Tasks, newest first"),
          h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.class }, c.text ?? c)))),
          h("tbody", {}, list.length ? list.flatMap(row) : none),
        ),
      ),
      next &&
        h(
          "button",
          {
            type: "button",
            "data-key": "further",
            onclick() {
              pages += 1;
              look();
            },
          },
          "Show more",
        ),
    );
  }

  swap(
    body,
    h(
      "search",
      { class: "filters" },
      field("Search", search),
      states,
      field("Class", select("priority", [["", "all"], ...[0, 1, 2, 3, 4].map((p) => [String(p), `P${p}`])])),
      field("Kind", select("kind", [["", "all"], ["session", "sessions"], ["job", "jobs"]])),
    ),
    h("section", { class: "card", "aria-label": "Tasks" }, rows, found),
  );
  look();
  const off = live.on("tasks", look);
  const timer = setInterval(() => {
    if (rows.querySelector("select:focus")) return;
    if ([...open.values()].some((reply) => reply?.ranks.length && !ENDED.includes(reply.task.state))) look();
    else if (list.some((t) => !ENDED.includes(t.state))) draw();
  }, 5000);
  return {
    stop() {
      off();
      clearInterval(timer);
      clearTimeout(typing);
      look.stop();
    },
  };
}
