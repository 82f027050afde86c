// Node groups: create, change, dissolve. A grouped node takes only tasks that request one of its groups.

import { api, refresher } from "../api.js";
import { ask, chip, field, h, swap, table, toast } from "../dom.js";
import { clock } from "../format.js";

export default function groups({ body, head, live, can }) {
  const list = h("section", { class: "card", "aria-label": "Groups" });
  let found = [];
  let nodes = [];

  const look = refresher(async () => {
    const [of, all] = await Promise.all([api.get("groups"), can("nodes:read") ? api.get("nodes") : { nodes: [] }]);
    if (look.stopped()) return;
    [found, nodes] = [of.groups, all.nodes];
    draw();
  }, (error) => toast(error.message, "bad"));

  async function edit(group) {
    if (can("nodes:read")) {
      try {
        nodes = (await api.get("nodes")).nodes; // includes nodes that appeared since the page was opened
      } catch (error) {
        toast(error.message, "bad");
      }
    }
    ask(group ? `Group ${group.name}` : "New group", group ? "Save" : "Create", (form) => {
      const name = h("input", { required: true, maxlength: 128, pattern: "[^\\/]+", value: group?.name ?? "", disabled: Boolean(group), spellcheck: "false" });
      const description = h("input", { maxlength: 1000, value: group?.description ?? "" });
      const known = [...new Set([...nodes.map((n) => n.node_id), ...(group?.nodes ?? [])])].sort();
      const boxes = known.map((id) => h("input", { type: "checkbox", value: id, checked: group?.nodes.includes(id) ?? false }));
      const others = h("input", { placeholder: "separated by commas", spellcheck: "false" });
      form.append(
        field("Name", name),
        field("Description", description),
        h(
          "fieldset",
          {},
          h("legend", {}, "Nodes"),
          boxes.length ? boxes.map((box) => h("label", { class: "choice" }, box, box.value)) : h("p", { class: "hint" }, "No node is known yet."),
        ),
        field("Further nodes", others, "Names of nodes that are not known yet."),
        h("p", { class: "hint" }, "Its nodes leave the common pool: they take only tasks that request one of their groups."),
      );
      return async () => {
        const more = others.value.split(",").map((n) => n.trim()).filter(Boolean);
        const chosen = [...boxes.filter((b) => b.checked).map((b) => b.value), ...more];
        await api.put(["groups", name.value.trim()], { description: description.value, nodes: [...new Set(chosen)] });
        toast(group ? `Group ${group.name} is changed` : `Group ${name.value.trim()} is created`);
        look();
      };
    });
  }

  function dissolve(group) {
    ask(
      `Dissolve ${group.name}?`,
      "Dissolve",
      (form) => {
        form.append(h("p", {}, "Its nodes return to the common pool, unless they are in another group. Running tasks continue."));
        return async () => {
          await api.delete(["groups", group.name]);
          toast(`Group ${group.name} is dissolved`);
          look();
        };
      },
      "danger",
    );
  }

  function draw() {
    const states = new Map(nodes.map((n) => [n.node_id, n.state]));
    swap(
      list,
      table(
        "Groups",
        ["group", "nodes", { text: "made", class: "wider" }, { text: "", class: "r" }],
        found.map((g) => [
          [h("strong", {}, g.name), h("span", { class: "sub" }, g.description)],
          g.nodes.length
            ? h("span", { class: "chips" }, g.nodes.map((n) => chip(states.get(n) === "active" ? n : `${n}: ${states.get(n) ?? "unknown"}`, states.get(n))))
            : "none",
          h("span", { class: "num" }, clock(g.created_at, false)),
          can("groups:write") && [
            h("button", { type: "button", "data-key": `edit ${g.name}`, "aria-label": `Edit ${g.name}`, onclick: () => edit(g) }, "Edit…"),
            " ",
            h("button", { type: "button", class: "danger", "data-key": `dissolve ${g.name}`, "aria-label": `Dissolve ${g.name}`, onclick: () => dissolve(g) }, "Dissolve…"),
          ],
        ]),
        "There are no groups: all nodes are in the common pool.",
      ),
    );
  }

  if (can("groups:write")) head.append(h("button", { type: "button", class: "primary", onclick: () => edit(null) }, "New group…"));
  swap(body, list);
  look();
  const off = live.on(["groups", "nodes"], look);
  return {
    stop() {
      off();
      look.stop();
    },
  };
}
