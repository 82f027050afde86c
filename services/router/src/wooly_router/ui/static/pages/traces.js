// Recent traces; one trace as a waterfall.

import { api, refresher } from "../api.js";
import { card, chip, h, swap, table, toast } from "../dom.js";
import { clock, nanos } from "../format.js";

const EVERY_MS = 5000;

export default function traces(context) {
  return context.rest.length ? one(context) : all(context);
}

function all({ body }) {
  const list = h("div", {});
  const look = refresher(
    async () => {
      const { traces: found } = await api.get("traces", { limit: 100 });
      if (look.stopped()) return;
      const longest = Math.max(1, ...found.map((t) => t.duration_ns));
      swap(
        list,
        card(
          "Recent traces",
          table(
            "Recent traces",
            ["trace", "task", "began", "took", { text: "spans", class: "r" }, ""],
            found.map((t) => [
              h("a", { href: `#/traces/${encodeURIComponent(t.trace_id)}`, "data-key": t.trace_id }, t.name),
              t.task_id ? h("a", { href: `#/tasks/${encodeURIComponent(t.task_id)}`, "data-key": `task ${t.trace_id}` }, t.task_id) : "–",
              h("span", { class: "num" }, clock(t.start_ns / 1e9)),
              h("span", { class: "meter" }, h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "bar", style: { width: `${(100 * t.duration_ns) / longest}%` } })), h("span", { class: "num" }, nanos(t.duration_ns))),
              String(t.spans),
              t.error && chip("error", "failed"),
            ]),
            "No traces yet. Run a script; outside of a local stack, set WOOLY_TRACES=router for all services first.",
          ),
        ),
      );
    },
    (error) => toast(error.message, "bad"),
  );
  swap(body, list);
  look();
  const timer = setInterval(look, EVERY_MS);
  return {
    stop() {
      clearInterval(timer);
      look.stop();
    },
  };
}

/** Spans as a tree, in the order of their start times: [{span, depth}]. Spans without a known parent are roots; so are spans in a cycle. */
export function ordered(spans) {
  const known = new Map(spans.map((s) => [s.span_id, s]));
  const children = new Map();
  for (const s of spans) {
    const parent = s.parent_id !== null && s.parent_id !== s.span_id && known.has(s.parent_id) ? s.parent_id : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(s);
  }
  for (const of of children.values()) of.sort((a, b) => a.start_ns - b.start_ns || (a.span_id < b.span_id ? -1 : 1));
  const found = [];
  const done = new Set();
  const walk = (s, depth) => {
    if (done.has(s.span_id)) return;
    done.add(s.span_id);
    found.push({ span: s, depth });
    for (const child of children.get(s.span_id) ?? []) walk(child, depth + 1);
  };
  for (const root of children.get("") ?? []) walk(root, 0);
  for (const s of spans) walk(s, 0);
  return found;
}

function one({ body, head, rest }) {
  const ofTask = rest[0] === "of" && rest.length > 1;
  const id = rest[ofTask ? 1 : 0];
  let stopped = false;

  function draw(trace) {
    const rows = ordered(trace.spans);
    const begin = Math.min(...trace.spans.map((s) => s.start_ns));
    const end = Math.max(...trace.spans.map((s) => s.end_ns));
    const whole = Math.max(1, end - begin);
    const share = (ns) => `${((100 * ns) / whole).toFixed(2)}%`;
    const services = [...new Set(trace.spans.map((s) => s.service))].sort();
    const opened = new Set();
    const list = h("div", { class: "waterfall", role: "list", "aria-label": "Spans" });
    const ticks = [0, 1, 2, 3, 4].map((i) => h("span", { style: { left: `${25 * i}%` } }, i ? nanos((whole * i) / 4) : "0"));

    function line({ span, depth }) {
      const shown = opened.has(span.span_id);
      const attributes = Object.entries(span.attributes ?? {});
      const took = span.end_ns - span.start_ns;
      return h(
        "div",
        { role: "listitem", class: span.error ? "failed" : undefined },
        h(
          "button",
          {
            type: "button",
            class: "span",
            title: `${span.name} of ${span.service}: ${nanos(took)}, begins after ${nanos(span.start_ns - begin)}`,
            "aria-expanded": String(shown),
            "data-key": span.span_id,
            onclick() {
              shown ? opened.delete(span.span_id) : opened.add(span.span_id);
              render();
            },
          },
          h(
            "span",
            { class: "name", style: { "padding-left": `${14 * depth}px` } },
            h("span", { class: `swatch s${services.indexOf(span.service) % 6}`, "aria-hidden": "true" }),
            h("span", { class: "text" }, span.name),
            h("span", { class: "hint" }, ` ${span.service}`),
            span.error && chip("error", "failed"),
          ),
          h(
            "span",
            { class: "lane", "aria-hidden": "true" },
            h("span", {
              class: `bar s${services.indexOf(span.service) % 6}`,
              style: { left: share(span.start_ns - begin), width: `max(2px, ${share(took)})` },
            }),
          ),
          h("span", { class: "num took" }, nanos(took)),
        ),
        shown &&
          h(
            "dl",
            { class: "facts" },
            h("div", {}, h("dt", {}, "begins after"), h("dd", {}, nanos(span.start_ns - begin))),
            attributes.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value)))),
            !attributes.length && h("p", { class: "hint" }, "This span has no attributes."),
          ),
      );
    }

    const render = () => swap(list, h("div", { class: "ruler", "aria-hidden": "true" }, h("span", { class: "lane" }, ticks)), rows.map(line));
    render();
    swap(
      body,
      card(
        rows[0]?.span.name ?? "Trace",
        h("p", { class: "hint" }, `${trace.spans.length} spans in ${services.length} services, ${nanos(whole)}, began ${clock(begin / 1e9)}. Trace `, h("code", {}, trace.trace_id)),
        list,
      ),
    );
  }

  head.append(h("a", { class: "button", href: ofTask ? `#/tasks/${encodeURIComponent(id)}` : "#/traces" }, ofTask ? "To the task" : "All traces"));
  api.get(ofTask ? ["tasks", id, "trace"] : ["traces", id]).then(
    (trace) => stopped || (trace.spans.length ? draw(trace) : swap(body, h("p", { class: "card" }, "This trace has no spans."))),
    (error) => {
      if (stopped || error.status === 401) return;
      swap(body, h("p", { class: "card", role: "alert" }, error.message));
    },
  );
  return { stop: () => (stopped = true) };
}
