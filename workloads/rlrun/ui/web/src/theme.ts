// Dark or light theme: the system's setting, unless the user has chosen one.
import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "dark" | "light";
const KEY = "rlrun-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

export function theme(): Theme {
  const kept = localStorage.getItem(KEY);
  return kept === "dark" || kept === "light" ? kept : "system";
}

export function setTheme(chosen: Theme): void {
  if (chosen === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, chosen);
  apply();
}

export function apply(): void {
  const chosen = theme();
  document.documentElement.style.colorScheme = chosen === "system" ? "light dark" : chosen;
  for (const listener of listeners) listener();
}

system.addEventListener("change", apply);

export function useDark(): boolean {
  const dark = () => (theme() === "system" ? system.matches : theme() === "dark");
  const [now, put] = useState(dark);
  useEffect(() => {
    const changed = () => put(dark());
    listeners.add(changed);
    return () => {
      listeners.delete(changed);
    };
  }, []);
  return now;
}
