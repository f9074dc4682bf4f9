// Requests to the server, and the hook that repeats one whenever its run has changed.
import { useEffect, useState } from "preact/hooks";
import type { Problem } from "./answers";
import { versionOf, onChange } from "./live";

export type Query = Record<string, string | number | undefined | null | readonly (string | number)[]>;

export function address(path: string, query: Query = {}): string {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") words.append(name, String(one));
    }
  }
  const text = words.toString();
  return text ? `${path}?${text}` : path;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  let reply: Response;
  try {
    reply = await fetch(`./api${path}`, { signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not respond; check that `rlrun ui` is still running.");
  }
  if (reply.ok) return (await reply.json()) as T;
  throw await refusal(reply);
}

/** Only logins and logouts use POST. */
export async function post(path: string, body: unknown): Promise<void> {
  const reply = await fetch(`./api${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!reply.ok) throw await refusal(reply);
}

let loggedOut: ((why: string) => void) | null = null;

/** Call `listener` when the server requires a login. */
export function onLoggedOut(listener: (why: string) => void): void {
  loggedOut = listener;
}

async function refusal(reply: Response): Promise<Error> {
  const refused = (await reply.json().catch(() => ({ problem: `the server returned ${reply.status}`, login: false }))) as Problem;
  if (reply.status === 401 && refused.login) loggedOut?.(refused.problem);
  return new Error(refused.problem);
}

export interface Asked<T> {
  answer: T | null;
  problem: string | null;
}

/** Response of a path; the previous one stays until the next arrives. `run`: repeat the request when this run changes; "*": any run. */
export function useAnswer<T>(path: string | null, run: string | null = null): Asked<T> {
  const [asked, put] = useState<Asked<T> & { path: string | null }>({ answer: null, problem: null, path: null });
  const [turn, again] = useState(0);
  useEffect(() => {
    if (run === null) return;
    let before = versionOf(run);
    return onChange(() => {
      const now = versionOf(run);
      if (now !== before) again((count) => count + 1);
      before = now;
    });
  }, [run]);
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    get<T>(path, stop.signal).then(
      (answer) => put({ answer, problem: null, path }),
      (error: Error) => {
        if (!stop.signal.aborted) put({ answer: null, problem: error.message, path });
      },
    );
    return () => stop.abort();
  }, [path, turn]);
  return asked;
}
