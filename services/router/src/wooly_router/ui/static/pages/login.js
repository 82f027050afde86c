// The login form. The token becomes a cookie that no script can read.

import { api } from "../api.js";
import { field, h } from "../dom.js";

export function loginPage(body, done) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const token = h("input", { type: "password", autocomplete: "current-password", required: true, spellcheck: "false" });
  const form = h(
    "form",
    {
      class: "card",
      async onsubmit(event) {
        event.preventDefault();
        try {
          await api.post("login", { token: token.value.trim() });
          token.value = "";
          done();
        } catch (error) {
          problem.textContent = error.status === 401 ? "This token is not valid or has expired." : error.message;
          problem.hidden = false;
          token.focus();
          token.select();
        }
      },
    },
    h("h1", {}, "Wooly"),
    field("API token", token, "Administrators create tokens under Settings or over REST."),
    problem,
    h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Log in")),
  );
  body.replaceChildren(h("main", { class: "alone" }, form));
  token.focus();
}
