// Frame of all pages: header, keyboard shortcuts, and the page of a URL.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Me } from "./answers";
import { get, onLoggedOut, post } from "./api";
import { ComparePage } from "./compare";
import { connected, listen, onChange, refused } from "./live";
import { LoginPage } from "./login";
import { Note, Title, useTitle } from "./parts";
import { RolloutPage } from "./rollout";
import { RolloutsPage } from "./rollouts";
import { to, useRoute, type Route } from "./route";
import { RunPage } from "./run";
import { RunsPage } from "./runs";
import { setTheme, theme, type Theme } from "./theme";

const KEYS: [string, string][] = [
  ["?", "show or hide these keys"],
  ["/", "go to the filter of the page"],
  ["g", "all runs"],
  ["r", "the run's rollouts"],
  ["j, k", "next and previous rollout"],
  ["← →", "values of a curve or tokens of a rollout, one by one, if it has the focus"],
];

function Page({ route }: { route: Route }) {
  const [kind, run, what, number] = route.parts;
  if (kind === undefined) return <RunsPage />;
  if (kind === "compare") return <ComparePage runs={route.query.getAll("run")} query={route.query} />;
  if (kind === "run" && run !== undefined) {
    if (what === undefined) return <RunPage key={run} id={run} query={route.query} />;
    if (what === "rollouts" && number === undefined) return <RolloutsPage key={run} id={run} query={route.query} />;
    if (what === "rollouts" && number !== undefined) return <RolloutPage key={run} id={run} number={Number(number)} query={route.query} />;
  }
  return <NotAPage />;
}

function NotAPage() {
  useTitle("Not a page");
  return (
    <>
      <Title>Not a page</Title>
      <Note kind="problem">
        There is no page at this URL. Start with <a href={to("/")}>all runs</a>.
      </Note>
    </>
  );
}

function typing(event: KeyboardEvent): boolean {
  const target = event.target as HTMLElement;
  return event.ctrlKey || event.metaKey || event.altKey || /^(input|select|textarea)$/i.test(target.tagName);
}

/** Current user; a text: reason why a login is required. */
function useMe(): Me | string | null {
  const [me, put] = useState<Me | string | null>(null);
  useEffect(() => {
    let asked = false;
    onLoggedOut((why) => {
      asked = true;
      put(why);
    });
    get<Me>("/me")
      .then(put)
      // Other errors are reported by the pages.
      .catch(() => asked || put({ user: null, session: false }))
      .finally(() => asked || listen());
  }, []);
  return me;
}

async function logOut(): Promise<void> {
  await post("/logout", {}).catch(() => undefined);
  location.reload();
}

export function App() {
  const route = useRoute();
  const me = useMe();
  const [chosen, choose] = useState<Theme>(theme());
  const [live, put] = useState<boolean | null>(null);
  const keys = useRef<HTMLDialogElement>(null);
  const [, why] = useState("");
  useEffect(
    () =>
      onChange(() => {
        put(connected);
        why(refused);
      }),
    [],
  );
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (typing(event)) return;
      const run = route.parts[0] === "run" ? route.parts[1] : undefined;
      const actions: Record<string, () => void> = {
        "?": () => (keys.current?.open ? keys.current.close() : keys.current?.showModal()),
        "/": () => document.querySelector<HTMLElement>("[data-filter] input, [data-filter] select")?.focus(),
        g: () => (location.hash = "/"),
        r: () => run && (location.hash = `/run/${run}/rollouts`),
        j: () => document.querySelector<HTMLElement>("[data-next]")?.click(),
        k: () => document.querySelector<HTMLElement>("[data-previous]")?.click(),
      };
      const action = actions[event.key];
      if (action === undefined || (keys.current?.open && event.key !== "?")) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [route]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>
        Skip to the content
      </a>
      <header>
        <a class="home" href={to("/")}>
          RLRun
        </a>
        <span class={`live ${live === false ? "off" : ""}`} role="status">
          {typeof me === "string" ? "" : live === null ? "connecting…" : live ? "live" : refused ? `not live: ${refused}` : "not connected: values may be outdated"}
        </span>
        {me !== null && typeof me === "object" && me.user !== null ? <span class="user">{me.user}</span> : null}
        {me !== null && typeof me === "object" && me.session ? (
          <button type="button" onClick={logOut}>
            Log out
          </button>
        ) : null}
        <button type="button" aria-haspopup="dialog" onClick={() => keys.current?.showModal()}>
          Keys
        </button>
        <label class="theme">
          <span class="hidden">Colors</span>
          <select
            value={chosen}
            onChange={(event) => {
              const value = event.currentTarget.value as Theme;
              setTheme(value);
              choose(value);
            }}
          >
            <option value="system">system</option>
            <option value="dark">dark</option>
            <option value="light">light</option>
          </select>
        </label>
      </header>
      <main id="main" tabIndex={-1}>
        {me === null ? <Note>Reading…</Note> : typeof me === "string" ? <LoginPage why={me} done={() => location.reload()} /> : <Page route={route} />}
      </main>
      <dialog ref={keys} aria-labelledby="keys">
        <h2 id="keys">Keys</h2>
        <dl class="facts">
          {KEYS.map(([key, text]) => (
            <div key={key}>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{text}</dd>
            </div>
          ))}
        </dl>
        <form method="dialog">
          <button type="button" onClick={() => keys.current?.close()}>
            Close
          </button>
        </form>
      </dialog>
    </>
  );
}
