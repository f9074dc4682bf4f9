// Shown steps, smoothing and scaling of curves: part of the URL, so that a link shows the same view.
import type { Scaling } from "./chart";
import { Choice, Field } from "./parts";
import { change } from "./route";

const SMOOTH = [["", "automatically"], ["1", "not at all"], ["5", "over 5 steps"], ["20", "over 20 steps"], ["100", "over 100 steps"]] as const;
const SCALES = [["", "linear, outliers marked"], ["all", "linear, all values"], ["log", "logarithmic"]] as const;

/** Window of the mean in steps; 0: the server decides. */
export function smooth(query: URLSearchParams): string {
  return query.get("smooth") ?? "0";
}

export function scaling(query: URLSearchParams): Scaling {
  const chosen = query.get("scale");
  return chosen === "all" || chosen === "log" ? chosen : "robust";
}

export function range(query: URLSearchParams) {
  return { first: query.get("first"), last: query.get("last") };
}

export const zoom = (first: number, last: number) => change({ first: Math.max(0, first), last });

export function View({ query, metrics, extra }: { query: URLSearchParams; metrics: string[]; extra?: string }) {
  return (
    <div class="tools" data-filter>
      <Field label="From step" value={query.get("first") ?? ""} put={(first) => change({ first })} />
      <Field label="To step" value={query.get("last") ?? ""} put={(last) => change({ last })} />
      <Choice label="Smooth" value={query.get("smooth") ?? ""} options={SMOOTH} put={(value) => change({ smooth: value })} />
      <Choice label="Scale" value={query.get("scale") ?? ""} options={SCALES} put={(value) => change({ scale: value })} />
      <Field label="Also draw" type="text" list="metrics" placeholder="name of a metric" value={extra ?? ""} put={(metric) => change({ metric })} />
      <datalist id="metrics">
        {metrics.map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
      {query.has("first") || query.has("last") ? (
        <button type="button" onClick={() => change({ first: null, last: null })}>
          Show all steps
        </button>
      ) : null}
    </div>
  );
}
