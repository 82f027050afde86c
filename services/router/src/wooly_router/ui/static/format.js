// Formats numbers and times for display.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** 1536 -> "1.5 KiB". */
export function bytes(n) {
  if (n === null || n === undefined) return "–";
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${UNITS[unit]}`;
}

/** 0.256 -> "26 %". */
export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);

/** Seconds -> "3 m 12 s". */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} m`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** Nanoseconds, short. */
export function nanos(ns) {
  if (ns < 1e3) return `${ns} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(ns < 1e4 ? 1 : 0)} µs`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(ns < 1e7 ? 1 : 0)} ms`;
  return span(ns / 1e9);
}

const two = (n) => String(n).padStart(2, "0");
const day = (d) => `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;

/** Seconds since the epoch -> "14:05:09", with the date if it is not today. */
export function clock(at, seconds = true) {
  if (at === null || at === undefined) return "–";
  const d = new Date(at * 1000);
  const time = `${two(d.getHours())}:${two(d.getMinutes())}${seconds ? `:${two(d.getSeconds())}` : ""}`;
  return day(d) === day(new Date()) ? time : `${day(d)} ${time}`;
}

/** Micro-credits -> "12.345"; without decimals from a thousand on. */
export function credits(ucr) {
  const n = Math.abs(ucr / 1e6);
  const digits = n >= 1000 ? 0 : 3;
  return (ucr / 1e6).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: n > 0 && n < 1 ? 6 : digits });
}

/** 12345 -> "12,345". */
export const count = (n) => n.toLocaleString("en");

/** (1, "task") -> "1 task". */
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** The task of a session. A job's session is named after the job and its attempt (JOB-N); other sessions are tasks themselves. */
export const taskOf = (session) => session.replace(/^(.{8,})-\d+$/, "$1");
