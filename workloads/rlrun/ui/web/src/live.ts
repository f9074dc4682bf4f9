// One stream of events for the page: fingerprints of all runs, which change when their folders do.
import type { Problem } from "./answers";

let runs: Record<string, string> = {};
let whole = "";
const listeners = new Set<() => void>();
export let connected: boolean | null = null;
/** The server's reason why it sends no events to this page; empty without one. */
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
    // A browser does not reconnect after a response that is not an event stream, such as 429; after other failures it does.
    if (events.readyState === EventSource.CLOSED) {
      ask();
      setTimeout(listen, 5000);
    }
  });
}

/** EventSource does not expose the reason of a refusal, so it is requested separately. */
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
