// One stream of events for the page: fingerprints of all runs, which change when their folders do.
let runs: Record<string, string> = {};
let whole = "";
const listeners = new Set<() => void>();
export let connected: boolean | null = null;

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
    tell();
  });
  events.addEventListener("error", () => {
    connected = false;
    tell();
    // A browser gives up after an answer that is no stream of events, such as 503; it tries again by itself after all others.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  });
}
