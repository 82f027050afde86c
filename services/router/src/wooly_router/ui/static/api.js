// Requests to REST, and the events that tell when to repeat them.

const BASE = new URL("../api/v1/", document.baseURI);

/** An error from REST. */
export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? `the controller answered ${status}`);
    this.status = status;
    this.code = body?.code ?? "";
  }
}

/**
 * `lost` is called when a token is required; `main.js` shows the login form. `logins` counts the logins of this page: a request
 * from before a login says nothing about the new token, so its refusal is ignored.
 */
export const access = { logins: 0, lost: () => {} };

async function call(method, path, body) {
  const { logins } = access;
  let answer;
  try {
    answer = await fetch(new URL(path, BASE), {
      method,
      credentials: "same-origin",
      headers: { "x-wooly-page": "1", ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new ApiError(0, { code: "ui.away", message: "the controller does not answer; trying again" });
  }
  const content = answer.headers.get("content-type")?.startsWith("application/json") ? await answer.json() : null;
  if (!answer.ok) {
    if (answer.status === 401 && path !== "login" && logins === access.logins) access.lost();
    throw new ApiError(answer.status, content);
  }
  return content;
}

/** A URL: the segments may contain any text, and empty query values are left out. */
export function path(segments, query = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== undefined && one !== null && one !== "") search.append(name, one);
  }
  const text = segments.map((s) => encodeURIComponent(s)).join("/");
  return search.size ? `${text}?${search}` : text;
}

export const api = {
  get: (segments, query) => call("GET", path([segments].flat(), query)),
  put: (segments, body) => call("PUT", path([segments].flat()), body),
  post: (segments, body = {}) => call("POST", path([segments].flat()), body),
  delete: (segments) => call("DELETE", path([segments].flat())),
};

/** Receives the controller's events. Listeners of `name` get its data; "resync" means: read everything again. */
export class Live {
  #source = null;
  #listeners = new Map();
  #broken = false;
  state = "off";
  onstate = () => {};

  start() {
    this.stop();
    const source = (this.#source = new EventSource(new URL("events", BASE)));
    source.onopen = () => {
      this.#say("live");
      if (this.#broken) this.#tell("resync", {}); // events were missed during the break
      this.#broken = false;
    };
    source.onerror = () => {
      this.#broken = true;
      this.#say("away");
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(async () => {
        if (this.#source !== source) return;
        try {
          await api.get("me"); // shows the login form if the token is missing
          this.start();
        } catch (error) {
          if (error.status !== 401) this.start();
        }
      }, 3000);
    };
    for (const name of ["metrics", "tasks", "nodes", "groups", "config", "resync"]) {
      source.addEventListener(name, (event) => this.#tell(name, JSON.parse(event.data)));
    }
  }

  stop() {
    this.#source?.close();
    this.#source = null;
    this.#say("off");
  }

  /** Add a listener; returns the function that removes it. */
  on(names, listener) {
    const all = [names, "resync"].flat();
    for (const name of all) {
      if (!this.#listeners.has(name)) this.#listeners.set(name, new Set());
      this.#listeners.get(name).add(listener);
    }
    return () => all.forEach((name) => this.#listeners.get(name).delete(listener));
  }

  #tell(name, data) {
    for (const listener of [...(this.#listeners.get(name) ?? [])]) listener(data, name);
  }

  #say(state) {
    this.state = state;
    this.onstate(state);
  }
}

/** A function that repeats a request: at once, then at most once per `ms`; the last call is never lost. Errors go to `failed`. */
export function refresher(read, failed, ms = 400) {
  let running = false;
  let again = false;
  let stopped = false;
  const run = async () => {
    if (stopped) return;
    if (running) {
      again = true;
      return;
    }
    running = true;
    try {
      await read();
    } catch (error) {
      if (!stopped && error.status !== 401) failed(error);
    }
    await new Promise((resolve) => setTimeout(resolve, ms));
    running = false;
    if (again) {
      again = false;
      run();
    }
  };
  run.stop = () => (stopped = true);
  run.stopped = () => stopped;
  return run;
}
