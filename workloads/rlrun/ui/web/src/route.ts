// Locations after the `#`: a path and a query. The server never receives them.
import { useEffect, useState } from "preact/hooks";
import { address, type Query } from "./api";

export interface Route {
  parts: string[];
  query: URLSearchParams;
}

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export function to(path: string, query: Query = {}): string {
  return `#${address(path, query)}`;
}

export function useRoute(): Route {
  const [route, put] = useState(() => parse(location.hash));
  useEffect(() => {
    const changed = () => put(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

/** Change parts of the current query; an empty value removes its name. */
export function change(values: Record<string, string | number | null>): void {
  const { parts, query } = parse(location.hash);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  const words = query.toString();
  location.hash = `/${parts.map(encodeURIComponent).join("/")}${words ? `?${words}` : ""}`;
}
