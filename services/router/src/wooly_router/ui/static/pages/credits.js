// Credits spent, by run, model or hour; budgets; prices.

import { api, refresher } from "../api.js";
import { ask, card, chip, field, h, meter, swap, table, toast } from "../dom.js";
import { bytes, clock, count, credits as amount, nanos, taskOf } from "../format.js";

const EVERY_MS = 5000;
const ROWS = 100;
const right = (text) => ({ text, class: "r" });

export default function credits({ body, head, me, can }) {
  let by = "run";
  let shown = ROWS;
  const content = h("div", { class: "stackup" });
  const choose = h(
    "select",
    {
      "aria-label": "Sum by",
      onchange() {
        by = choose.value;
        shown = ROWS;
        look();
      },
    },
    [["run", "by run"], ["model", "by model"], ["hour", "by hour"]].map(([value, text]) => h("option", { value }, text)),
  );
  const tenant = h("input", { type: "search", placeholder: "all tenants", "aria-label": "Tenant", spellcheck: "false", onchange: () => look() });
  if (me.tenant === null) head.append(tenant);
  head.append(choose);

  const look = refresher(
    async () => {
      const [found, prices] = await Promise.all([
        api.get("credits", { by, limit: shown, tenant: tenant.value.trim() }),
        api.get(["credits", "plans"]),
      ]);
      if (!look.stopped()) draw(found, prices.plans);
    },
    (error) => {
      if (error.code === "router.no_metering") {
        swap(content, h("p", { class: "card" }, "No metering service answers, so credits are not counted. Start one with wooly up or python -m wooly_metering."));
      } else toast(error.message, "bad");
    },
  );

  function setBudget(budget) {
    ask(budget ? `Budget of ${budget.tenant}` : "New budget", "Save", (form) => {
      const name = h("input", { required: true, maxlength: 128, value: budget?.tenant ?? tenant.value.trim(), disabled: Boolean(budget), spellcheck: "false" });
      const period = h("select", {}, ["total", "month", "day"].map((p) => h("option", { value: p, selected: p === budget?.period }, p)));
      const limit = (ucr) => h("input", { type: "number", min: 0, step: "any", value: ucr === null || ucr === undefined ? "" : ucr / 1e6 });
      const [soft, hard] = [limit(budget?.soft_ucr), limit(budget?.hard_ucr)];
      form.append(
        field("Tenant", name),
        field("Period", period),
        field("Soft limit, credits", soft, "Reaching it causes an event. Empty: no limit."),
        field("Hard limit, credits", hard, "When it is reached, the tenant's sessions are suspended until it is raised. Empty: no limit."),
      );
      const ucr = (input) => (input.value === "" ? null : Math.round(Number(input.value) * 1e6));
      return async () => {
        await api.put(["credits", "budgets", name.value.trim()], { period: period.value, soft_ucr: ucr(soft), hard_ucr: ucr(hard) });
        toast(`The budget of ${name.value.trim()} is set`);
        look();
      };
    });
  }

  function budgets(found) {
    const used = (b) => {
      const limit = b.hard_ucr ?? b.soft_ucr;
      return limit === null ? amount(b.spent_ucr) : meter(limit ? b.spent_ucr / limit : 1, amount(b.spent_ucr), `Budget of ${b.tenant}`);
    };
    const limit = (ucr) => (ucr === null ? "–" : amount(ucr));
    return card(
      "Budgets",
      table(
        "Budgets",
        ["tenant", "period", "spent", right("soft"), right("hard"), "", right("")],
        found.map((b) => [
          b.tenant,
          b.period,
          used(b),
          limit(b.soft_ucr),
          limit(b.hard_ucr),
          b.held && chip("sessions suspended", "failed"),
          can("credits:write") && h("button", { type: "button", "data-key": `budget ${b.tenant}`, "aria-label": `Change the budget of ${b.tenant}`, onclick: () => setBudget(b) }, "Change…"),
        ]),
        "No tenant has a budget.",
      ),
      can("credits:write") && h("div", { class: "actions" }, h("button", { type: "button", "data-key": "new budget", onclick: () => setBudget(null) }, "New budget…")),
    );
  }

  function draw(found, plans) {
    const name = (row) => {
      if (by === "hour") return clock(Number(row.name) / 1e6, false);
      return by === "run" ? h("a", { href: `#/tasks/${encodeURIComponent(taskOf(row.name))}`, "data-key": `run ${row.name}` }, row.name) : row.name || "–";
    };
    const tile = (label, value, note) => h("div", { class: "tile" }, h("span", { class: "name" }, label), h("span", { class: "value" }, value), h("span", { class: "note" }, note));
    const most = Math.max(1, ...found.rows.map((r) => r.core_ucr + r.vram_ucr));
    swap(
      content,
      h(
        "div",
        { class: "tiles" },
        tile("Spent", amount(found.core_ucr + found.vram_ucr), "credits in all"),
        tile("Cores", amount(found.core_ucr), "cores × time executing"),
        tile("VRAM", amount(found.vram_ucr), "bytes × time held"),
        found.quarantined > 0 && tile("In quarantine", count(found.quarantined), "records that could not be booked"),
      ),
      card(
        "Usage",
        table(
          `Credits by ${by}`,
          [by, "tenant", ...(by === "run" ? ["model"] : []), "credits", right("cores"), right("VRAM"), right("programs"), right("device time"), right("moved"), "until"],
          found.rows.map((r) => [
            name(r),
            r.tenant,
            ...(by === "run" ? [r.model || "–"] : []),
            meter((r.core_ucr + r.vram_ucr) / most, amount(r.core_ucr + r.vram_ucr), `Credits of ${r.name}`),
            amount(r.core_ucr),
            amount(r.vram_ucr),
            count(r.runs),
            nanos(r.gpu_ns),
            bytes(r.moved_bytes),
            h("span", { class: "num" }, clock(r.until_us / 1e6), " ", by === "run" && !r.ended && chip("running", "started")),
          ]),
          "No usage has been booked yet.",
        ),
        found.more &&
          h(
            "button",
            {
              type: "button",
              "data-key": "further",
              disabled: shown >= 1000,
              onclick() {
                shown = Math.min(1000, shown + ROWS);
                look();
              },
            },
            "Show more",
          ),
      ),
      h(
        "div",
        { class: "two" },
        budgets(found.budgets),
        card(
          "Prices",
          table(
            "Price plans",
            ["plan", "device", "class", right("per core and ms"), right("per MiB and s"), right("idle"), "valid from"],
            plans.map((p) => [
              p.name,
              p.device_kind || "any",
              p.priority === null ? "any" : chip(`P${p.priority}`, `p${p.priority}`),
              amount(p.core_rate),
              amount(p.vram_rate),
              amount(p.idle_rate),
              p.valid_from_us ? clock(p.valid_from_us / 1e6, false) : "ever",
            ]),
            "No price plan was added, so the built-in prices apply.",
          ),
        ),
      ),
    );
  }

  swap(body, content);
  look();
  const timer = setInterval(look, EVERY_MS);
  return {
    stop() {
      clearInterval(timer);
      look.stop();
    },
  };
}
