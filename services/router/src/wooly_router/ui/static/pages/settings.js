// Settings: the theme, the cluster's settings, tenants with their tokens, and the audit log.

import { api, refresher } from "../api.js";
import { ask, card, chip, field, h, swap, table, toast } from "../dom.js";
import { clock } from "../format.js";

const DAY = 86400;
/** Settings of the cluster: name, label, hint, minimum, maximum, factor from the page's unit to REST's unit. */
const CONFIG = [
  ["default_vram_overcommit_percent", "VRAM overcommit, percent", "Memory that may be promised beyond a device's capacity, for nodes without their own value.", 0, 1000, 1],
  ["default_vram_claim", "Default claim, MiB", "Memory with which a session that declares none counts at least on each device. What it uses counts if it is more.", 0, 1073741824, 1 << 20],
  ["queue_patience_s", "Patience, seconds", "How long later tasks may overtake a waiting task before devices are held for it.", 0, 86400, 1],
  ["queue_aging_s", "Aging, seconds", "How long a task waits before it rises by one class.", 1, 2592000, 1],
  ["hibernate_after_s", "Hibernation, minutes", "How long a session does nothing before its memory is stored and its device is free. 0: never.", 0, 525600, 60],
  ["job_attempts", "Attempts per job", "How often a job is tried if its executors are lost.", 1, 100, 1],
  ["task_retention_s", "Retention of ended tasks, days", "", 60 / DAY, 3650, DAY],
  ["history_retention_s", "Retention of metrics, days", "", 60 / DAY, 3650, DAY],
];
/** Settings with a choice: name, label, hint, and each value with its text. */
const CHOICES = [
  [
    "recovery",
    "Recovery",
    "Whether sessions go on in another executor after the loss of their own, if their client does not say it.",
    [
      ["off", "off: they end with their executor"],
      ["auto", "auto: sessions of at most 2 GiB go on"],
      ["on", "on: all sessions go on"],
    ],
  ],
];
const ROLES = ["user", "operator", "admin"];
const CLASSES = ["P0, the highest", "P1", "P2", "P3", "P4, the lowest"];
const MAX_WEIGHT = 1 << 20;

function theme() {
  const choice = () => window.woolyTheme.choice();
  const boxes = ["system", "light", "dark"].map((name) =>
    h(
      "label",
      { class: "choice" },
      h("input", {
        type: "radio",
        name: "theme",
        value: name,
        checked: choice() === name,
        onchange() {
          window.woolyTheme.choose(name);
          document.dispatchEvent(new Event("wooly-theme"));
        },
      }),
      { system: "as the system", light: "light", dark: "dark" }[name],
    ),
  );
  const follow = () => boxes.forEach((b) => (b.firstChild.checked = b.firstChild.value === choice()));
  document.addEventListener("wooly-theme", follow);
  return [card("Appearance", h("fieldset", { class: "across" }, h("legend", {}, "Theme"), boxes)), () => document.removeEventListener("wooly-theme", follow)];
}

function cluster(can) {
  const place = h("div", {}, h("p", { class: "hint" }, "Reading…"));
  const look = refresher(async () => {
    const config = await api.get("config");
    if (look.stopped() || place.contains(document.activeElement)) return; // do not overwrite the user's input
    const choices = CHOICES.map(([name, , , values]) =>
      h("select", { disabled: !can("config:write") }, values.map(([value, text]) => h("option", { value, selected: config[name] === value }, text))),
    );
    const inputs = CONFIG.map(([name, , , min, max, unit]) => h("input", { type: "number", min, max, step: "any", required: true, value: config[name] / unit, disabled: !can("config:write") }));
    swap(
      place,
      h(
        "form",
        {
          class: "grid",
          async onsubmit(event) {
            event.preventDefault();
            const numbers = CONFIG.map(([name, , , , , unit], i) => [name, Number(inputs[i].value) * unit]);
            const chosen = CHOICES.map(([name], i) => [name, choices[i].value]);
            const changed = Object.fromEntries([...numbers, ...chosen].filter(([name, value]) => value !== config[name]));
            try {
              Object.assign(config, await api.put("config", changed));
              toast("The settings are saved");
            } catch (error) {
              toast(error.message, "bad");
            }
          },
        },
        CONFIG.map(([, label, hint], i) => field(label, inputs[i], hint)),
        CHOICES.map(([, label, hint], i) => field(label, choices[i], hint)),
        can("config:write") && h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Save")),
      ),
    );
  }, (error) => toast(error.message, "bad"));
  return [card("Cluster", place), look];
}

function tenants(can) {
  const place = h("div", {});
  const open = new Map(); // tokens by tenant
  const look = refresher(async () => {
    const found = (await api.get("tenants")).tenants;
    for (const name of open.keys()) open.set(name, (await api.get(["tenants", name, "tokens"])).tokens);
    if (!look.stopped()) draw(found);
  }, (error) => toast(error.message, "bad"));

  function edit(tenant) {
    ask(tenant ? `Tenant ${tenant.name}` : "New tenant", tenant ? "Save" : "Create", (form) => {
      const name = h("input", { required: true, maxlength: 128, pattern: "[^\\/]+", value: tenant?.name ?? "", disabled: Boolean(tenant), spellcheck: "false" });
      const description = h("input", { maxlength: 1000, value: tenant?.description ?? "" });
      const disabled = h("input", { type: "checkbox", checked: tenant?.disabled ?? false });
      const opaque = h("input", { type: "checkbox", checked: tenant?.opaque_kernels ?? false });
      const exclusive = h("input", { type: "checkbox", checked: tenant?.exclusive ?? false });
      const highest = h("select", {}, !tenant && h("option", { value: "" }, "the router's default"), CLASSES.map((text, i) => h("option", { value: i, selected: tenant?.class_ceiling === i }, text)));
      const weight = h("input", { type: "number", min: 1, max: MAX_WEIGHT, step: 1, required: Boolean(tenant), value: tenant?.weight_ceiling ?? "" });
      form.append(
        field("Name", name),
        field("Description", description),
        field("Highest class", highest, "For its sessions and jobs. Running ones above it are lowered to it."),
        field("Largest weight", weight, tenant ? "Maximum weight inside a class." : "Empty: the router's default."),
        h("label", { class: "choice" }, exclusive, "exclusive use: it may use a device exclusively"),
        h("label", { class: "choice" }, disabled, "disabled: it can do nothing"),
        h("label", { class: "choice" }, opaque, "opaque kernels: it may launch kernels that executors cannot check (PTX)"),
      );
      return async () => {
        const changes = { description: description.value, disabled: disabled.checked, opaque_kernels: opaque.checked };
        // Unchanged fields keep the router's default, even if the default changes later.
        if (highest.value !== "" && Number(highest.value) !== tenant?.class_ceiling) changes.class_ceiling = Number(highest.value);
        if (weight.value !== "" && Number(weight.value) !== tenant?.weight_ceiling) changes.weight_ceiling = Number(weight.value);
        if (exclusive.checked !== (tenant?.exclusive ?? false)) changes.exclusive = exclusive.checked;
        await api.put(["tenants", name.value.trim()], changes);
        look();
      };
    });
  }

  async function token(tenant) {
    const made = await ask(`New token of ${tenant.name}`, "Create", (form) => {
      const name = h("input", { maxlength: 100, placeholder: "its purpose" });
      const role = h("select", {}, ROLES.map((r) => h("option", { value: r }, r)));
      const days = h("input", { type: "number", min: 0, step: "any", value: 90 });
      form.append(field("Name", name), field("Role", role), field("Valid for days", days, "Empty: until it is revoked."));
      return () => {
        const expires = days.value === "" ? null : Number(days.value) * 86400;
        return api.post(["tenants", tenant.name, "tokens"], { name: name.value, role: role.value, expires_in_s: expires });
      };
    });
    if (!made) return;
    look();
    await ask("The token's secret", "I have saved it", (form) => {
      const secret = h("input", { readonly: true, value: made.secret, spellcheck: "false" });
      form.append(field("Secret", secret, "It will not be shown again."));
      setTimeout(() => secret.select());
    });
  }

  function revoke(tenant, id) {
    ask(
      "Revoke this token?",
      "Revoke",
      (form) => {
        form.append(h("p", {}, "Requests with it are refused at once."));
        return async () => {
          await api.delete(["tenants", tenant, "tokens", id]);
          look();
        };
      },
      "danger",
    );
  }

  function tokens(tenant) {
    const now = Date.now() / 1000;
    const state = (t) => {
      if (t.revoked_at !== null) return chip("revoked", "failed");
      return t.expires_at !== null && t.expires_at <= now ? chip("ended", "cancelled") : chip("valid", "completed");
    };
    return table(
      `Tokens of ${tenant}`,
      ["token", "role", "scopes", "made", "valid until", "", { text: "", class: "r" }],
      open.get(tenant).map((t) => [
        [t.name || "–", h("span", { class: "sub" }, t.id)],
        t.role,
        t.scopes.join(", ") || "all scopes of its role",
        clock(t.created_at, false),
        t.expires_at === null ? "it is revoked" : clock(t.expires_at, false),
        state(t),
        can("tenants:write") && t.revoked_at === null && h("button", { type: "button", class: "danger", "data-key": `revoke ${t.id}`, "aria-label": `Revoke ${t.name || t.id}`, onclick: () => revoke(tenant, t.id) }, "Revoke…"),
      ]),
      "This tenant has no tokens.",
    );
  }

  function draw(found) {
    const row = (tenant) => {
      const shown = open.has(tenant.name);
      const toggle = async () => {
        if (!open.delete(tenant.name)) open.set(tenant.name, []);
        look();
      };
      const main = h(
        "tr",
        {},
        h("td", {}, h("button", { type: "button", class: "expand", "aria-expanded": String(shown), "data-key": `tenant ${tenant.name}`, onclick: toggle }, h("span", { class: "arrow", "aria-hidden": "true" }), tenant.name)),
        h("td", {}, tenant.description || "–"),
        h("td", {}, tenant.disabled ? chip("disabled", "failed") : chip("active", "active")),
        h("td", {}, `up to P${tenant.class_ceiling}, weight ${tenant.weight_ceiling.toLocaleString("en")}`),
        h("td", {}, [tenant.exclusive && "exclusive use", tenant.opaque_kernels && "opaque kernels"].filter(Boolean).join(", ") || "–"),
        h("td", { class: "num" }, clock(tenant.created_at, false)),
        h(
          "td",
          { class: "r" },
          can("tenants:write") && [
            h("button", { type: "button", "data-key": `edit ${tenant.name}`, "aria-label": `Edit ${tenant.name}`, onclick: () => edit(tenant) }, "Edit…"),
            " ",
            h("button", { type: "button", "data-key": `token ${tenant.name}`, "aria-label": `New token of ${tenant.name}`, onclick: () => token(tenant) }, "New token…"),
          ],
        ),
      );
      return shown ? [main, h("tr", { class: "more" }, h("td", { colspan: 7 }, tokens(tenant.name)))] : [main];
    };
    swap(
      place,
      table("Tenants", ["tenant", "description", "state", "ceilings", "permissions", "made", { text: "", class: "r" }], found.flatMap(row), "There are no tenants yet."),
      can("tenants:write") && h("div", { class: "actions" }, h("button", { type: "button", "data-key": "new tenant", onclick: () => edit(null) }, "New tenant…")),
    );
  }
  return [card("Tenants and tokens", place), look];
}

function audit() {
  const place = h("div", {});
  const entries = [];
  const look = refresher(async () => {
    const page = await api.get("audit", { limit: 30, before: entries.at(-1)?.id });
    if (look.stopped()) return;
    entries.push(...page.entries);
    swap(
      place,
      table(
        "Audit log",
        ["at", "who", "what", "of", "how"],
        entries.map((e) => [h("span", { class: "num" }, clock(e.at)), e.actor, e.action, e.target, h("code", {}, JSON.stringify(e.detail))]),
        "No changes yet.",
      ),
      page.entries.length === 30 && h("button", { type: "button", "data-key": "further", onclick: look }, "Show older entries"),
    );
  }, (error) => toast(error.message, "bad"));
  return [card("Audit log", place), look];
}

export default function settings({ body, live, can, me }) {
  const [appearance, forget] = theme();
  const cards = [appearance];
  const looks = [];
  const off = [];
  const add = ([node, look], events) => {
    cards.push(node);
    looks.push(look);
    look();
    if (events) off.push(live.on(events, look));
  };
  if (can("config:read")) add(cluster(can), "config");
  if (can("tenants:read")) add(tenants(can));
  if (can("audit:read")) add(audit());
  cards.push(
    card(
      "This session",
      h(
        "p",
        {},
        me.auth === "open"
          ? "The controller requires no tokens: every client that reaches it may do everything. To require tokens, set WOOLY_ROUTER_AUTH=tokens."
          : `You are ${me.actor} of tenant ${me.own} and can see ${me.tenant === null ? "all tenants" : "your own tenant"}.`,
      ),
      me.auth === "tokens" && h("p", { class: "hint" }, `Scopes: ${me.may.join(", ")}.`),
    ),
  );
  swap(body, cards);
  return {
    stop() {
      forget();
      off.forEach((f) => f());
      looks.forEach((look) => look.stop());
    },
  };
}
