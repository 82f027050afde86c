// The frame around the pages: the caller, navigation, the theme, the state of the event stream.

import { access, api, Live } from "./api.js";
import { h, svg, swap } from "./dom.js";
import { loginPage } from "./pages/login.js";

/** Pages by the first part of the hash: title, the scope that the page requires, its module, its icon. */
const PAGES = {
  "": ["Dashboard", "nodes:read", () => import("./pages/dashboard.js"), "M3 13h7V3H3zm11 8h7V11h-7zM3 21h7v-4H3zM14 3v4h7V3z"],
  tasks: ["Tasks", "tasks:read", () => import("./pages/tasks.js"), "M4 6h2m3 0h11M4 12h2m3 0h11M4 18h2m3 0h11"],
  nodes: ["Nodes", "nodes:read", () => import("./pages/nodes.js"), "M4 4h16v6H4zm0 10h16v6H4zM8 7h.01M8 17h.01"],
  groups: ["Groups", "groups:read", () => import("./pages/groups.js"), "M4 4h7v7H4zm9 0h7v7h-7zM4 13h7v7H4zm9 0h7v7h-7z"],
  credits: ["Credits", "credits:read", () => import("./pages/credits.js"), "M12 3a9 9 0 100 18 9 9 0 000-18zm3 6.5a3.5 3.5 0 10-1 5"],
  traces: ["Traces", "tasks:read", () => import("./pages/traces.js"), "M3 5h10M7 10h9M11 15h6M15 20h6"],
  settings: ["Settings", "", () => import("./pages/settings.js"), "M4 7h9m4 0h3M4 17h3m4 0h9M15 4.5v5M9 14.5v5"],
};
const THEMES = ["system", "light", "dark"];

const live = new Live();
const main = h("main", { id: "main", tabindex: -1 });
let current = null;
let me = null;

/** "#/tasks/x?state=started" -> {name, rest, query}. */
function where() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { name, rest: rest.filter(Boolean), query: new URLSearchParams(query) };
}

async function show(focus = true) {
  current?.stop?.();
  current = null;
  const { name, rest, query } = where();
  const [title, scope, load] = PAGES[name] ?? ["Nothing here", "", null];
  document.title = `${title} – Wooly`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const heading = h("h1", { tabindex: -1 }, title);
  const body = h("div", { class: "page", "aria-busy": "true" });
  swap(main, h("header", { class: "head" }, heading), body);
  if (focus) heading.focus();
  const can = (what) => me.may.includes(what);
  if (load === null) {
    swap(body, h("p", {}, "This page does not exist. ", h("a", { href: "#/" }, "To the dashboard")));
  } else if (scope && !can(scope)) {
    swap(body, h("p", { class: "card" }, `This page requires the scope ${scope}, which this token does not have.`));
  } else {
    const page = (await load()).default;
    if (!body.isConnected) return; // the user has opened another page
    current = page({ body, head: main.querySelector(".head"), live, me, can, rest, query });
  }
  body.removeAttribute("aria-busy");
}

function themeButton() {
  const label = () => `Theme: ${window.woolyTheme.choice()}`;
  const icons = {
    system: "M4 5h16v11H4zM9 20h6",
    light: "M12 8a4 4 0 100 8 4 4 0 000-8zM12 2v2m0 16v2M2 12h2m16 0h2M5 5l1.4 1.4m11.2 11.2L19 19M19 5l-1.4 1.4M6.4 17.6L5 19",
    dark: "M20 14.5A8 8 0 119.5 4a6.5 6.5 0 0010.5 10.5z",
  };
  const icon = () => svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" }, svg("path", { d: icons[window.woolyTheme.choice()] }));
  const text = h("span", {}, label());
  const button = h(
    "button",
    {
      type: "button",
      class: "quiet",
      id: "theme",
      onclick() {
        const next = THEMES[(THEMES.indexOf(window.woolyTheme.choice()) + 1) % THEMES.length];
        window.woolyTheme.choose(next);
        text.textContent = label();
        button.replaceChildren(icon(), text);
        document.dispatchEvent(new Event("wooly-theme"));
      },
    },
    icon(),
    text,
  );
  document.addEventListener("wooly-theme", () => {
    text.textContent = label();
    button.replaceChildren(icon(), text);
  });
  return button;
}

function shell() {
  const says = { live: "live", away: "reconnecting…", off: "offline" };
  const state = h("p", { id: "live", class: "live", role: "status" });
  live.onstate = (now) => {
    state.dataset.state = now;
    state.textContent = says[now];
  };
  const links = Object.entries(PAGES).map(([name, [title, , , icon]]) =>
    h(
      "li",
      {},
      h(
        "a",
        { href: `#/${name}`, "data-page": name },
        svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" }, svg("path", { d: icon })),
        title,
      ),
    ),
  );
  const who = me.auth === "open" ? "no tokens required" : `${me.own} · ${me.tenant === null ? "sees all tenants" : "own tenant"}`;
  document.body.replaceChildren(
    h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to content"),
    h(
      "div",
      { class: "side" },
      h("p", { class: "brand" }, h("img", { src: "icon.svg", alt: "", width: 22, height: 22 }), "Wooly"),
      h("nav", { "aria-label": "Pages" }, h("ul", {}, links)),
      h("div", { class: "foot" }, state, h("p", { class: "who" }, who), themeButton(), me.auth === "tokens" && logoutButton()),
    ),
    main,
    h("div", { id: "toasts", role: "status", "aria-live": "polite" }),
  );
}

function logoutButton() {
  const leave = async () => {
    await api.delete("login").catch(() => {});
    start();
  };
  return h("button", { type: "button", class: "quiet", onclick: leave }, "Log out");
}

let asking = false;
function login() {
  if (asking) return;
  asking = true;
  current?.stop?.();
  current = null;
  live.stop();
  document.title = "Log in – Wooly";
  loginPage(document.body, () => {
    access.logins += 1;
    asking = false;
    start();
  });
}

/** "#/login/CODE", as `wooly status` prints it: the code logs this browser in once, and is removed from the address at once. */
async function loginByCode() {
  const { name, rest } = where();
  if (name !== "login") return;
  history.replaceState(null, "", "#/");
  if (rest.length === 1) await api.post("login", { token: rest[0] }).catch(() => {}); // otherwise the login form is shown
}

async function start() {
  try {
    me = await api.get("me");
  } catch (error) {
    if (error.status === 401) return;
    document.body.replaceChildren(h("main", { class: "alone" }, h("h1", {}, "Wooly"), h("p", { role: "alert" }, error.message)));
    setTimeout(start, 3000);
    return;
  }
  shell();
  live.start();
  await show(false);
}

access.lost = login;
window.addEventListener("hashchange", async () => {
  if (where().name === "login") {
    await loginByCode();
    asking = false;
    start();
  } else if (me && !asking) show();
});
loginByCode().then(start);
