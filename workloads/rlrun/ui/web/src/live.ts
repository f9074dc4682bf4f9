// One stream of events for the page: fingerprints of all runs, which change when their folders do.
import type { Problem } from "./answers";

let runs: Record<string, string> = {};
let whole = "";
const listeners = new Set<() => void>();
export let connected: boolean | null = null;
/** The server's own words on why it sends no events to this page; empty: it has said nothing. */
export let refused = "";

export function versionOf(run: string): string {
  return run === "*" ? whole : (runs[run] ?? "");
}

export function onChange(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(): void {
  for (const listener of listeners) listener();
}

export function listen(): void {
  const events = new EventSource("./api/events");
  events.addEventListener("runs", (event) => {
    whole = (event as MessageEvent<string>).data;
    runs = JSON.parse(whole) as Record<string, string>;
    connected = true;
    refused = "";
    tell();
  });
  events.addEventListener("error", () => {
    connected = false;
    tell();
    // A browser gives up after an answer that is no stream of events, such as 429; it tries again by itself after all others.
    if (events.readyState === EventSource.CLOSED) {
      ask();
      setTimeout(listen, 5000);
    }
  });
}

/** An EventSource does not tell why it was refused. */
function ask(): void {
  const stop = new AbortController();
  fetch("./api/events", { signal: stop.signal })
    .then(async (reply) => {
      refused = reply.status === 429 ? ((await reply.json()) as Problem).problem : "";
      tell();
      stop.abort();
    })
    .catch(() => undefined);
}
