"""The web UI in a real browser, with a router's process: every page, by mouse and by keyboard."""

import contextlib
import json
import re
import time

import httpx
import pytest
from wooly_wis.messages import GangPlace
from wooly_wis.traces import SpanRecord

pytestmark = [pytest.mark.connected, pytest.mark.timeout(120)]
PAGES = ["Dashboard", "Tasks", "Nodes", "Groups", "Credits", "Traces", "Settings"]
ABSENT = "status of 404"
REFUSED = "status of 4"
#: Accessibility rules for users who cannot see or have no mouse; returns the violations.
ACCESSIBLE = """() => {
  const wrong = [];
  const say = (e, what) => wrong.push(`${what}: ${e.outerHTML.slice(0, 120)}`);
  const named = (e) => (e.ariaLabel || e.title || e.alt || e.textContent.trim()
    || [...(e.labels ?? [])].map((l) => l.textContent.trim()).join("")
    || (e.getAttribute("aria-labelledby") ?? "").split(" ").map((i) => document.getElementById(i)?.textContent).join(""));
  for (const one of ["h1", "main", "nav"])
    if (document.querySelectorAll(one).length !== 1) wrong.push(`not one ${one}`);
  const roles = "[role=meter], [role=img], [role=region], [role=list]";
  for (const e of document.querySelectorAll(`a[href], button, input, select, section, nav, dialog, ${roles}`))
    if (!named(e)) say(e, "no name");
  for (const e of document.querySelectorAll("table")) if (!e.caption?.textContent) say(e, "no caption");
  for (const e of document.querySelectorAll("th")) if (!e.scope) say(e, "no scope");
  for (const e of document.querySelectorAll("[aria-expanded=true][aria-controls]"))
    if (!document.getElementById(e.getAttribute("aria-controls"))) say(e, "controls nothing");
  for (const e of document.querySelectorAll("[onclick], [style*=url], [tabindex]"))
    if (e.tabIndex > 0 || e.hasAttribute("onclick")) say(e, "out of order");
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`id twice: ${id}`);
  if (!document.documentElement.lang || !document.title) wrong.push("no language or title");
  return wrong;
}"""

#: Texts with too little contrast to their background (WCAG AA: 4.5, large texts 3).
FAINT = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const behind = (e) => {
    const layers = [];
    for (; e; e = e.parentElement) layers.push(rgb(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim();
    const e = texts.currentNode.parentElement;
    const style = getComputedStyle(e);
    if (!text || !e.checkVisibility() || e.closest(":disabled, option, .sr")) continue;
    const under = behind(e);
    const [a, b] = [light(over(rgb(e instanceof SVGElement ? style.fill : style.color), under)), light(under)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 18 ? 3 : 4.5)) faint.add(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return [...faint];
}"""
#: Elements that extend beyond the window's sides, unless they can be scrolled.
WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const scrolled = (e) => e && (getComputedStyle(e).overflowX !== "visible" || scrolled(e.parentElement));
  return [`${document.documentElement.scrollWidth} of ${width}`, ...[...document.body.querySelectorAll("*")]
    .filter((e) => e.getBoundingClientRect().right > width + 0.5 && !scrolled(e.parentElement))
    .map((e) => e.outerHTML.slice(0, 90))];
}"""


def sync_error():
    from playwright.sync_api import Error

    return Error


def heading(page, name):
    page.get_by_role("heading", level=1, name=name, exact=True).wait_for()
    page.locator(".page:not([aria-busy])").wait_for()


def go(page, name):
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()


def row(page, text):
    return page.get_by_role("row").filter(has_text=text)


def test_pages_are_reachable_by_keyboard(visit, cluster):
    cluster.open("reached.py", tenant="acme")
    page = visit(expected=[ABSENT])
    heading(page, "Dashboard")
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to content"
    page.keyboard.press("Enter")
    assert page.locator(":focus").get_attribute("id") == "main"
    for name in PAGES:
        link = page.get_by_role("navigation", name="Pages").get_by_role("link", name=name)
        link.focus()
        page.keyboard.press("Enter")
        heading(page, name)
        assert page.title() == f"{name} – Wooly" and link.get_attribute("aria-current") == "page"
        assert name == "Dashboard" or page.locator(":focus").inner_text() == name  # focus moves to the heading
        page.locator("main table, main .card").first.wait_for()
        assert page.evaluate(ACCESSIBLE) == [], name
    page.goto(f"{cluster.url}/ui/#/no/such")
    page.get_by_text("This page does not exist.").wait_for()


def test_root_redirects_and_assets_are_local(visit, cluster):
    asked = []
    page = visit("nothing-yet.svg", expected=[ABSENT])
    page.on("request", lambda r: asked.append(r.url))
    page.goto(cluster.url)
    heading(page, "Dashboard")
    assert page.url == f"{cluster.url}/ui/" and len(asked) > 8
    assert all(url.startswith(cluster.url) for url in asked)


def test_content_policy_blocks_injected_scripts(visit, cluster):
    answer = httpx.get(f"{cluster.url}/ui/", trust_env=False)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    for path in ("..%2f..%2f__init__.py", "..%2f__init__.py", "%2e%2e/__init__.py"):
        assert httpx.get(f"{cluster.url}/ui/{path}", trust_env=False).status_code == 404
    page = visit(expected=["TrustedHTML", "TrustedScript", "Content Security Policy"])
    heading(page, "Dashboard")
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("() => { document.body.innerHTML = '<b>x</b>'; }")
    for script in ("b.setAttribute('onclick', 'window.ran = 1')", "b.append(document.createElement('script'))"):
        with contextlib.suppress(sync_error()):  # refused when it is created or when it would run
            page.evaluate(f"""() => {{
              const b = document.createElement("button");
              {script};
              b.querySelector("script")?.append("window.ran = 1");
              document.body.append(b);
              b.click();
            }}""")
    assert page.evaluate("() => window.ran") is None


def test_foreign_text_is_not_markup(visit, cluster):
    name = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
    task = cluster.open(name, tenant="<u>beta</u>")
    cluster.rest("POST", f"tasks/{task}/cancel", json={"reason": "<b onmouseover=alert(1)>"})
    cluster.rest("PUT", "groups/<s>g", json={"description": name, "nodes": ["node-a", "<em>later"]})
    try:
        page = visit("#/tasks")
        button = page.get_by_role("button", name=name)
        button.click()
        page.get_by_text("<b onmouseover=alert(1)>").first.wait_for()
        go(page, "Dashboard")
        page.get_by_role("link", name=name).wait_for()
        go(page, "Nodes")
        page.get_by_text("H100 <b>").first.wait_for()
        go(page, "Groups")
        row(page, "<em>later").get_by_text(name).wait_for()
        go(page, "Credits")
        page.get_by_role("link", name="<i>run</i>").wait_for()
        go(page, "Settings")
        row(page, "group.put").get_by_text("<s>g").first.wait_for()
        assert page.evaluate("() => [window.hacked ?? null, document.querySelectorAll('[src=x], main b b, main em, main s, main i').length]") == [None, 0]  # fmt: skip # noqa: E501
    finally:
        cluster.rest("DELETE", "groups/<s>g")


def test_theme_follows_system_until_chosen(visit):
    page = visit("#/settings", color_scheme="dark")
    heading(page, "Settings")

    def shown(theme):
        page.wait_for_function("t => document.documentElement.dataset.theme === t", arg=theme)
        return page.evaluate("() => getComputedStyle(document.body).backgroundColor")

    dark = shown("dark")
    page.emulate_media(color_scheme="light")
    light = shown("light")
    assert light != dark
    button = page.get_by_role("button", name="Theme:")
    for choice, colour in (("light", light), ("dark", dark)):
        button.click()
        assert button.inner_text() == f"Theme: {choice}" and shown(choice) == colour
        assert page.get_by_role("radio", name=choice).is_checked()
    page.reload()
    heading(page, "Settings")
    assert shown("dark") == dark
    page.get_by_role("radio", name="as the system").check()
    assert shown("light") == light and button.inner_text() == "Theme: system"


def test_dashboard_shows_live_numbers_and_charts(visit, cluster):
    cluster.open("moving.py")
    cluster.devices[0].utilization = 0.5
    page = visit()
    page.locator(".tile", has_text="Utilization").get_by_text("50 %").wait_for()
    page.locator(".tile", has_text="Starvation").get_by_text("25 %").wait_for()
    chart = page.get_by_role("img", name=re.compile("^Utilization: now 50 % on average of 2 devices"))
    chart.wait_for()
    assert chart.locator("path.line").count() == 2
    cluster.devices[0].utilization = 1.0
    page.locator(".tile", has_text="Utilization").get_by_text("75 %").wait_for()  # without a reload
    page.get_by_role("meter", name="Utilization of gpu-a").and_(page.locator("[aria-valuenow='100']")).wait_for()
    page.get_by_role("img", name=re.compile("now 75 %")).focus()
    page.keyboard.press("ArrowLeft")
    tip = page.locator(".tip:not([hidden])")
    assert "gpu-a" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.count() == 0
    before = cluster.rest("GET", "overview")["tasks"]["started"]
    page.get_by_role("img", name=re.compile(f"^Tasks: now {before} running, 0 waiting")).wait_for()
    page.get_by_role("img", name=re.compile("^Nodes: now 2 nodes, 2 devices")).wait_for()
    cluster.open("moving-too.py")
    page.get_by_role("img", name=re.compile(f"^Tasks: now {before + 1} running")).wait_for()
    page.get_by_label("Span of the charts").select_option("24 h")
    page.get_by_role("table", name="Utilization in numbers").get_by_role("row", name="gpu-b").wait_for()
    cluster.devices[0].utilization = 0.5


def test_tasks_page_finds_opens_and_cancels_tasks(visit, cluster):
    low, high = cluster.open("find-low.py", priority=4, tenant="acme"), cluster.open("find-high.py", priority=0)
    page = visit("#/tasks?text=find-")
    opened = page.get_by_role("button", name="find-low.py")
    opened.focus()
    assert opened.get_attribute("aria-expanded") == "false"
    page.keyboard.press("Enter")
    story = page.locator(".story")
    story.wait_for()
    assert opened.get_attribute("aria-expanded") == "true"
    assert page.locator(":focus").inner_text() == "find-low.py"  # the row was drawn again and kept the focus
    assert story.locator("li").count() == 2 and "started" in story.inner_text()
    assert "gpu-" in page.get_by_role("table", name="Points of the chosen devices").inner_text()
    page.get_by_role("combobox", name="Class", exact=True).first.select_option("P0")
    page.get_by_role("button", name="find-high.py").wait_for()
    page.get_by_role("button", name="find-low.py").wait_for(state="detached")
    assert "priority=0" in page.url
    page.get_by_role("combobox", name="Class", exact=True).first.select_option("all")
    page.get_by_role("checkbox", name="cancelled").check()
    page.get_by_text("No task matches.").wait_for()
    page.get_by_role("checkbox", name="cancelled").uncheck()
    page.locator(".detail").get_by_label("Class").select_option("P1")
    page.get_by_text("find-low.py is now in class P1").wait_for()
    assert cluster.rest("GET", f"tasks/{low}")["task"]["priority"] == 1
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("dialog", name="Cancel find-low.py?").wait_for()
    assert page.evaluate(ACCESSIBLE) == []
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0 and cluster.rest("GET", f"tasks/{low}")["task"]["state"] == "started"
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_label("Reason").fill("enough of it")
    page.get_by_role("button", name="Cancel the task").click()
    story.get_by_text("enough of it").wait_for()
    assert cluster.rest("GET", f"tasks/{low}")["task"]["state"] == "cancelled"
    page.get_by_role("searchbox", name="Search").fill(high)
    page.get_by_role("button", name="find-high.py").wait_for()
    page.get_by_role("button", name="find-low.py").wait_for(state="detached")


def test_tasks_page_shows_where_the_ranks_of_a_program_are(visit, cluster):
    places = [GangPlace(gang_id="three-ranks", rank=rank, size=3, devices=2) for rank in range(3)]
    sessions = [cluster.open("ranks.py", gang=place) for place in places]
    page = visit("#/tasks?text=ranks.py")
    page.get_by_role("button", name="ranks.py").click()
    table = page.get_by_role("table", name=re.compile("^Ranks of "))
    table.wait_for()
    assert table.locator("thead th").all_inner_texts() == ["rank", "device", "state", "cores", "memory", "swapped"]
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert [row[0] for row in rows] == ["0", "1", "2"] and {row[2] for row in rows} == {"started"}
    on = [cluster.rest("GET", f"tasks/{s}")["task"]["executors"][0] for s in sessions]
    assert [row[1] for row in rows] == [f"{name} (H100 <b>)" for name in on] and len(set(on)) == 2
    used = 132 * 0.2 * cluster.devices[0].utilization  # a fifth of the busy time of 132 cores
    page.locator("td", has_text=f"{used:.1f}").first.wait_for()
    page.get_by_text("5.0 GiB").first.wait_for()
    assert page.evaluate(ACCESSIBLE) == []


def test_tasks_page_says_why_a_session_cannot_move_or_hibernate(visit, cluster):
    task = cluster.open("stays-here.py")  # its client cannot go on elsewhere
    page = visit(f"#/tasks?text={task}", expected=[REFUSED])
    page.get_by_role("button", name="stays-here.py").click()
    page.get_by_role("button", name="Hibernate").click()
    page.get_by_text("cannot go on in another executor").wait_for()
    page.get_by_role("button", name="Move…").click()
    dialog = page.get_by_role("dialog", name="Move stays-here.py?")
    assert page.evaluate(ACCESSIBLE) == []
    dialog.get_by_role("button", name="Move the session").click()
    dialog.get_by_text("cannot go on in another executor").wait_for()


def test_tasks_page_shows_changes_without_reload(visit, cluster):
    page = visit("#/tasks?text=live-")
    page.get_by_text("No task matches.").wait_for()
    page.locator("#live", has_text="live").wait_for()
    task = cluster.open("live-one.py")
    row(page, "live-one.py").get_by_text("started").wait_for()
    cluster.rest("POST", f"tasks/{task}/cancel")
    row(page, "live-one.py").get_by_text("cancelled").wait_for()


def test_nodes_page_drains_node_and_other_pages_update(visit, cluster):
    page, other = visit("#/nodes"), visit("#/nodes")
    theirs = other.get_by_role("region", name="Node node-b")
    theirs.get_by_role("button", name="Drain node-b").wait_for()
    here = page.get_by_role("region", name="Node node-b")
    busy = cluster.rest("GET", "nodes/node-b")["tasks"] > 0
    here.get_by_role("button", name="Drain node-b").click()
    theirs.get_by_text("draining" if busy else "drained", exact=True).wait_for()
    assert cluster.rest("GET", "nodes/node-b")["wish"] == "draining"
    theirs.get_by_role("button", name="Activate node-b").click()
    here.get_by_text("active", exact=True).wait_for()
    here.get_by_role("button", name="Cordon node-b").click()
    here.get_by_text("cordoned", exact=True).wait_for()
    here.get_by_role("button", name="Activate node-b").click()
    here.get_by_text("active", exact=True).wait_for()
    here.get_by_role("button", name="Overcommit of node-b").click()
    page.get_by_label("VRAM that may be promised").fill("40")
    page.get_by_role("button", name="Save").click()
    here.get_by_text("overcommit 40 %, its own").wait_for()
    cluster.rest("PUT", "nodes/node-b/config", json={"overcommit_vram_percent": None})


def test_nodes_page_shows_owners_of_memory(visit, cluster):
    task = cluster.open("memory.py", tenant="mapped")
    node = cluster.rest("GET", f"tasks/{task}")["task"]["nodes"][0]
    page = visit("#/nodes")
    here = page.get_by_role("region", name=f"Node {node}")
    owners = here.get_by_role("list", name="By owner")
    owners.get_by_text("mapped").wait_for()
    assert "5.0 GiB" in owners.get_by_role("listitem").filter(has_text="mapped").inner_text()
    kinds = here.get_by_role("list", name="By kind").inner_text()
    assert "own to sessions" in kinds and "reserve 2.0 GiB" in kinds
    here.get_by_role("button", name=re.compile("session")).click()
    cells = here.get_by_role("row").filter(has_text=task).inner_text()
    assert "mapped" in cells and "4.0 GiB" in cells
    page.get_by_role("searchbox").fill("no such")
    page.get_by_text("No node matches.").wait_for()


def test_groups_page_creates_changes_and_dissolves_group(visit, cluster):
    page = visit("#/groups")
    page.get_by_role("button", name="New group…").click()
    dialog = page.get_by_role("dialog", name="New group")
    dialog.get_by_label("Name", exact=True).fill("a/b")
    dialog.get_by_role("button", name="Create").click()
    assert dialog.get_by_label("Name", exact=True).evaluate("e => e.validity.patternMismatch")
    dialog.get_by_label("Name", exact=True).fill("fast ones")
    dialog.get_by_label("Description").fill("for the impatient")
    dialog.get_by_label("node-b").check()
    dialog.get_by_label("Further nodes").fill("node-y, node-z")
    dialog.get_by_role("button", name="Create").click()
    row(page, "fast ones").get_by_text("node-y: lost").wait_for()
    group = cluster.rest("GET", "groups")["groups"][0]
    assert (group["name"], group["nodes"]) == ("fast ones", ["node-b", "node-y", "node-z"])
    edit = page.get_by_role("button", name="Edit fast ones")
    edit.click()
    drawn = edit.element_handle()
    cluster.rest("PUT", "groups/fast%20ones", json={"description": "for others, too", "nodes": group["nodes"]})
    page.get_by_text("for others, too").wait_for()
    assert not drawn.evaluate("e => e.isConnected")
    page.get_by_label("node-y").uncheck()
    page.get_by_role("button", name="Save").click()
    page.get_by_text("node-y: lost").wait_for(state="detached")
    assert page.locator(":focus").get_attribute("aria-label") == "Edit fast ones"
    page.get_by_role("button", name="Dissolve fast ones").click()
    page.get_by_role("dialog").get_by_role("button", name="Dissolve").click()
    page.get_by_text("There are no groups").wait_for()
    assert cluster.rest("GET", "groups")["groups"] == []


def test_credits_page_shows_credits_and_sets_budget(visit, cluster):
    page = visit("#/credits")
    page.locator(".tile", has_text="Spent").get_by_text("1.750").wait_for()
    assert "llama" in row(page, "<i>run</i>").inner_text()
    page.get_by_role("button", name="New budget…").click()
    dialog = page.get_by_role("dialog", name="New budget")
    dialog.get_by_label("Tenant").fill("acme")
    dialog.get_by_label("Hard limit, credits").fill("3.5")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("meter", name="Budget of acme").and_(page.locator("[aria-valuenow='50']")).wait_for()
    assert cluster.budgets["acme"].hard_ucr == 3_500_000
    page.get_by_label("Sum by").select_option("by model")
    page.get_by_role("table", name="Credits by model").wait_for()
    page.get_by_role("searchbox", name="Tenant").fill("nobody")
    page.keyboard.press("Enter")
    page.get_by_text("No usage has been booked yet.").wait_for()


def test_settings_page_changes_settings_and_creates_token(visit, cluster):
    page = visit("#/settings")
    page.get_by_label("VRAM overcommit, percent").fill("25")
    page.get_by_label("Retention of metrics, days").fill("2")
    page.get_by_label("Recovery").select_option("on")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("The settings are saved").wait_for()
    config = cluster.rest("GET", "config")
    assert (config["default_vram_overcommit_percent"], config["history_retention_s"]) == (25, 172800)
    assert config["recovery"] == "on"
    cluster.rest("PUT", "config", json={"default_vram_overcommit_percent": 0, "recovery": "auto"})
    page.get_by_role("button", name="New tenant…").click()
    page.get_by_label("Name", exact=True).fill("newcomer")
    page.get_by_role("button", name="Create").click()
    page.get_by_role("button", name="New token of newcomer").click()
    page.get_by_role("dialog").get_by_label("Name").fill("ci")
    page.get_by_role("button", name="Create").click()
    assert page.get_by_role("textbox", name="Secret").input_value().startswith("wooly")
    page.get_by_role("button", name="I have saved it").click()
    page.get_by_role("button", name="newcomer", exact=True).click()
    page.get_by_role("button", name="Revoke ci").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("table", name="Tokens of newcomer").get_by_text("revoked", exact=True).wait_for()


@pytest.mark.slow  # the form of settings is tested above
def test_settings_page_grants_and_withdraws_permission(visit, cluster):
    cluster.rest("PUT", "tenants/careful", json={})
    page = visit("#/settings")
    row = page.get_by_role("row", name=re.compile("^careful "))
    row.get_by_role("cell", name="opaque kernels").wait_for(state="detached")
    for allowed in (True, False):
        row.get_by_role("button", name="Edit careful").click()
        box = page.get_by_role("dialog").get_by_label("opaque kernels")
        assert box.is_checked() is not allowed
        box.set_checked(allowed)
        page.get_by_role("button", name="Save").last.click()
        row.get_by_role("cell", name="opaque kernels").wait_for(state="visible" if allowed else "detached")
        (tenant,) = [t for t in cluster.rest("GET", "tenants")["tenants"] if t["name"] == "careful"]
        assert tenant["opaque_kernels"] is allowed and not tenant["disabled"]


@pytest.mark.slow  # the form of settings is tested above
def test_settings_page_shows_and_sets_ceilings(visit, cluster):
    cluster.rest("PUT", "tenants/bounded", json={"class_ceiling": 3, "weight_ceiling": 50, "exclusive": False})
    page = visit("#/settings")
    row = page.get_by_role("row", name=re.compile("^bounded "))
    row.get_by_role("cell", name="up to P3, weight 50").wait_for()
    row.get_by_role("button", name="Edit bounded").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_label("Highest class").input_value() == "3"
    assert dialog.get_by_label("Largest weight").input_value() == "50"
    assert not dialog.get_by_label("exclusive use").is_checked()
    dialog.get_by_label("Highest class").select_option("P0, the highest")
    dialog.get_by_label("Largest weight").fill("2000")
    dialog.get_by_label("exclusive use").check()
    page.get_by_role("button", name="Save").last.click()
    row.get_by_role("cell", name="up to P0, weight 2,000").wait_for()
    row.get_by_role("cell", name="exclusive use").wait_for()
    (tenant,) = [t for t in cluster.rest("GET", "tenants")["tenants"] if t["name"] == "bounded"]
    assert (tenant["class_ceiling"], tenant["weight_ceiling"], tenant["exclusive"]) == (0, 2000, True)


def test_refusal_from_before_a_login_leaves_the_page_usable(visit, guarded):
    """A request that was sent without a token is answered after the next login. The page must not wait for another login."""
    admin = (guarded.directory / "owner.token").read_text()
    page = visit("#/nodes", url=guarded.url, expected=["status of 401"])
    token, held = page.get_by_label("API token"), []
    page.route("**/api/v1/groups", lambda route: held.append(route))

    def log_in():
        token.fill(admin)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Drain node-a").wait_for()

    log_in()
    with page.expect_request("**/api/v1/groups"):
        page.evaluate("() => { import('./api.js').then(({ api }) => api.get('groups')).catch(() => {}); }")
    page.get_by_role("button", name="Log out").click()
    log_in()
    with page.expect_response("**/api/v1/groups") as refused:
        held[0].fulfill(status=401, json={"code": "router.unauthorized", "message": "late"})
    assert refused.value.status == 401
    page.unroute("**/api/v1/groups")
    go(page, "Groups")
    page.get_by_text("There are no groups").wait_for()


def test_login_with_token_hides_token_from_scripts(visit, guarded):
    url = guarded.url
    admin = (guarded.directory / "owner.token").read_text()
    head = {"Authorization": f"Bearer {admin}"}
    with httpx.Client(base_url=f"{url}/api/v1/", headers=head, trust_env=False) as http:
        http.put("tenants/acme", json={}).raise_for_status()
        made = http.post("tenants/acme/tokens", json={"role": "user"}).json()
        page = visit("#/nodes", url=url, expected=["status of 401", "status of 403"])
        token = page.get_by_label("API token")
        token.fill("guess")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("not valid").wait_for()
        token.fill(admin)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Drain node-a").click()
        page.get_by_role("button", name="Activate node-a").click()
        page.get_by_role("button", name="Drain node-a").wait_for()
        (cookie,) = page.context.cookies()
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["path"] == "/api/v1"
        assert page.evaluate("() => document.cookie") == "" and admin not in page.content()
        assert admin not in page.evaluate("() => JSON.stringify([localStorage, sessionStorage, location.href])")
        # A strict cookie: another site's request would have the cookie, but not our header
        bare = page.context.request.put(f"{url}/api/v1/nodes/node-a/state", data={"state": "draining"})
        assert bare.status == 403 and http.get("nodes/node-a").json()["wish"] == "active"
        go(page, "Traces")
        page.get_by_text("set WOOLY_TRACES=router for all services first").wait_for()
        go(page, "Nodes")
        page.get_by_role("button", name="Log out").click()
        token.fill(made["secret"])
        page.keyboard.press("Enter")
        page.get_by_text("acme · own tenant").wait_for()
        page.get_by_role("region", name="Node node-a").wait_for()
        assert page.get_by_role("button", name="Drain node-a").count() == 0
        http.delete(f"tenants/acme/tokens/{made['id']}").raise_for_status()
        page.evaluate("() => { location.hash = '#/groups'; }")
        token.wait_for()  # the next request is refused
    assert page.context.cookies()[0]["value"] == made["secret"]


def test_login_with_owner_code_is_valid_once_and_leaves_no_trace(guarded, visit):
    url, owner = guarded.url, (guarded.directory / "owner.token").read_text()
    head = {"Authorization": f"Bearer {owner}"}
    code = httpx.post(f"{url}/api/v1/login/code", headers=head, trust_env=False).json()["code"]
    page = visit(f"#/login/{code}", url=url)
    page.get_by_role("heading", name="Dashboard").wait_for()
    assert "login" not in page.url and code not in page.content()
    page.go_back()
    assert page.url == "about:blank", "the code must not be in the history"
    page.go_forward()
    page.get_by_role("heading", name="Dashboard").wait_for()
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["value"] not in (owner, code)
    again = visit(f"#/login/{code}", url=url, expected=["status of 401"])
    again.get_by_label("API token").wait_for()
    assert again.context.cookies() == [] and code not in again.url


WIDTHS = (390, 768)


def at_widths(page):
    """Set the window's width to that of a phone, then of a tablet."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("w => document.documentElement.clientWidth === w", arg=width)
        yield width


@pytest.mark.slow
def test_pages_fit_narrow_windows(visit, cluster):
    task = cluster.open("a-script-with-a-rather-long-name-in-a-folder/train_everything.py", tenant="narrow-tenant")
    cluster.rest(
        "PUT", "groups/narrow", json={"description": "of phones " * 8, "nodes": ["node-x", "node-y", "node-z"]}
    )
    try:
        page = visit(expected=[ABSENT])
        page.set_viewport_size({"width": WIDTHS[0], "height": 844})
        for name in PAGES:
            go(page, name)
            heading(page, name)
            page.locator("main table, main .card").first.wait_for()
            for width in at_widths(page):
                assert page.evaluate(WIDE) == [], (name, width)
                for link in page.get_by_role("navigation", name="Pages").get_by_role("link").all():
                    box = link.bounding_box()
                    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] >= 28
        go(page, "Tasks")
        page.get_by_role("searchbox", name="Search").fill(task)
        page.get_by_text("1 task, newest first").wait_for()
        page.get_by_role("button", name="a-script-with-a-rather-long-name").click()
        page.locator(".story li").first.wait_for()
        for width in at_widths(page):
            assert page.evaluate(WIDE) == [], width
            # A phone's row omits some columns; the row's details show them
            assert "narrow-tenant" in page.locator(".detail").inner_text()
            for reached in (page.get_by_role("button", name="Cancel…"), page.locator(".detail").get_by_label("Class")):
                box = reached.bounding_box()
                assert box["x"] >= 0 and box["x"] + box["width"] <= width
            page.get_by_role("button", name="Cancel…").click()
            box = page.get_by_role("dialog").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 844
            page.keyboard.press("Escape")
        go(page, "Nodes")
        page.get_by_role("button", name=re.compile("session")).first.click()
        for width in at_widths(page):
            assert page.evaluate(WIDE) == [], width
    finally:
        cluster.rest("DELETE", "groups/narrow")


@pytest.mark.slow
def test_texts_have_contrast_in_both_themes(visit, cluster):
    cluster.rest("POST", f"tasks/{cluster.open('faint.py', priority=0)}/cancel")
    page = visit(expected=[ABSENT])

    def assert_texts_stand_out(where):
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.wait_for_function("t => document.documentElement.dataset.theme === t", arg=theme)
            assert page.evaluate(FAINT) == [], (where, theme)

    for name in PAGES:
        go(page, name)
        heading(page, name)
        page.locator("main table, main .card").first.wait_for()
        assert_texts_stand_out(name)
    go(page, "Groups")
    page.get_by_role("button", name="New group…").click()
    page.get_by_role("dialog").wait_for()
    assert_texts_stand_out("a dialog")


def test_keyboard_reaches_all_controls_with_visible_focus(visit, cluster):
    cluster.open("keys.py")
    page = visit("#/tasks?text=keys", expected=[ABSENT])
    page.get_by_role("button", name="keys.py").focus()
    page.keyboard.press("Enter")
    page.locator(".story li", has_text="started").wait_for()
    page.get_by_role("button", name="Cancel…").wait_for()
    # By what names a control, not by its element: an update of the list may replace the element meanwhile, and change the text of
    # a region, which has a label.
    page.evaluate("""() => {
      const text = (e) => e.ariaLabel ? "" : e.textContent.trim();
      window.nameOf = (e) => [e.tagName, e.dataset.key, e.name, e.ariaLabel, e.href, text(e)].join("|");
      window.reached = new Set();
    }""")
    reached = """() => {
      const e = document.activeElement;
      if (e === document.body) return null;
      const style = getComputedStyle(e);
      window.reached.add(window.nameOf(e));
      return [e.outerHTML.slice(0, 80), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
    }"""
    page.evaluate("() => document.activeElement.blur()")
    # One full cycle, from the current element over the browser's own controls to the top of the page.
    for _ in range(70):
        page.keyboard.press("Tab")
        found = page.evaluate(reached)
        assert found is None or found[1], found[0]
    tabbable = "a[href], button:not(:disabled), input:not(:disabled), select:not(:disabled), [tabindex='0']"
    missed = "s => [...document.querySelectorAll(s)].filter((e) => e.checkVisibility() && !reached.has(nameOf(e)))"
    assert page.evaluate(f"s => ({missed})(s).map((e) => e.outerHTML.slice(0, 80))", tabbable) == []
    go(page, "Groups")
    opens = page.get_by_role("button", name="New group…")
    opens.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="New group")
    dialog.wait_for()
    for _ in range(10):  # the keyboard cannot leave the dialog
        assert page.evaluate(
            "() => document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        )
        page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert opens.evaluate("e => e === document.activeElement")


SPANS = [
    ("a", None, "session", "client", 0, 100, False, {}),
    ("c", "b", "launch <b>", "executor", 30, 60, True, {"error.message": "<i>no</i>"}),
    ("b", "a", "place", "router", 10, 90, False, {"executors": 2}),
    ("x", "y", "lost", "metering", 70, 80, False, {}),
    ("p", "q", "circle", "router", 5, 6, False, {}),
    ("q", "p", "circle", "router", 5, 6, False, {}),
]


def test_trace_page_draws_waterfall(visit, cluster):
    """The test itself answers the requests, by the contract of the endpoints."""
    begin = 1_700_000_000_000_000_000
    spans = [
        {"span_id": i, "parent_id": p, "name": n, "service": s, "start_ns": begin + a * 10**6, "end_ns": begin + b * 10**6,
         "error": e, "attributes": d}
        for i, p, n, s, a, b, e, d in SPANS
    ]  # fmt: skip
    listed = {"trace_id": "t1", "name": "session", "task_id": "job-1", "start_ns": begin, "duration_ns": 10**8}
    page = visit("#/groups")
    heading(page, "Groups")

    def answer(body):
        return lambda route: route.fulfill(content_type="application/json", body=json.dumps(body))

    page.route("**/api/v1/traces?*", answer({"traces": [listed | {"spans": len(spans), "error": True}]}))
    page.route("**/api/v1/traces/t1", answer({"trace_id": "t1", "spans": spans}))
    page.route("**/api/v1/tasks/job-1/trace", answer({"trace_id": "t1", "spans": spans[:1]}))
    go(page, "Traces")
    assert "100 ms" in row(page, "job-1").inner_text()
    row(page, "job-1").get_by_role("link", name="session").click()
    names = page.locator(".waterfall .text")
    names.first.wait_for()
    assert names.all_inner_texts() == ["session", "place", "launch <b>", "lost", "circle", "circle"]
    failed = page.get_by_role("button", name="launch <b>")
    left = failed.locator(".bar").evaluate("e => [e.style.left, e.style.width]")
    assert left == ["30%", "max(2px, 30%)"] and "error" in failed.inner_text()
    assert failed.get_attribute("title") == "launch <b> of executor: 30 ms, begins after 30 ms"
    failed.press("Enter")
    page.get_by_text("<i>no</i>").wait_for()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(WIDE) == [] and failed.locator(".lane").bounding_box()["width"] > 280
    assert page.evaluate(ACCESSIBLE) == []
    page.goto(f"{cluster.url}/ui/#/traces/of/job-1")
    page.get_by_text("1 spans in 1 services").wait_for()


def test_trace_page_of_task_matches_rest(visit, cluster, waterfall):
    """The router's own spans, and spans that other services published."""
    task = cluster.open("drawn.py")

    def read(name):
        with contextlib.suppress(httpx.HTTPStatusError):  # no spans have arrived yet
            found = cluster.rest("GET", f"tasks/{task}/trace")
            return found if any(s["name"] == name for s in found["spans"]) else None
        return None

    def told(name):
        deadline = time.monotonic() + 60
        while (found := read(name)) is None:
            assert time.monotonic() < deadline, name
            time.sleep(0.05)
        return found

    trace = told("router.session")
    root = next(s for s in trace["spans"] if s["name"] == "router.session")
    begin, last = root["end_ns"], root["span_id"]
    spans = []
    for n, (name, took) in enumerate(
        [("executor.session", 400_000), ("executor.first_run", 90_000), ("metering.book", 70_000)]
    ):
        below = {"trace_id": trace["trace_id"], "span_id": f"{n + 1:016x}", "parent_id": last, "name": name}
        spans.append(SpanRecord(**below, start_ns=begin + n * 1000, end_ns=begin + n * 1000 + took))
        last = below["span_id"]
    for span in spans:
        cluster.record(span.name.partition(".")[0], span)
    for span in spans:
        trace = told(span.name)
    page = visit("#/traces")
    row(page, task).get_by_role("link", name="drawn.py").click()
    page.locator(".waterfall .text").first.wait_for()
    waterfall.assert_is(waterfall.rows(page), trace["spans"])
    assert {"router", "executor", "metering"} <= {r["service"] for r in waterfall.rows(page)}


def test_page_without_router_reconnects(visit, cluster):
    url = cluster.router("short")
    page = visit("#/tasks", url=url, expected=["ERR_", "Failed to load"])
    page.locator("#live", has_text="live").wait_for()
    process = cluster._routers[-1]
    process.terminate()
    assert process.wait(10) == 0  # an open page does not delay the router's end
    page.locator("#live", has_text="reconnecting").wait_for()
