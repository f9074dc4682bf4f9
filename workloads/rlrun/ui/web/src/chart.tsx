// Curves over steps. Dragging with the mouse zooms; input fields do the same for the keyboard, whose arrow keys read single values.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { CurveView } from "./answers";
import { inUnit, number } from "./format";
import { useDark } from "./theme";

export type Scaling = "robust" | "all" | "log";

export interface Curve {
  label: string;
  view: CurveView | undefined;
  /** Whether points are sparse, so that the line only connects them. */
  sparse?: boolean;
}

interface ChartProps {
  title: string;
  curves: Curve[];
  scaling: Scaling;
  zoom?: (first: number, last: number) => void;
  height?: number;
}

// Okabe and Ito's colors, which most color-blind readers can distinguish, with adjusted lightness for contrast; dashes distinguish them without color.
const LIGHT = ["#0b5cad", "#b34700", "#006e52", "#a0377c", "#7a5c00", "#3f3f46", "#0077a3", "#8a1c1c"];
const DARK = ["#7db8f7", "#f5a25d", "#4fd1a5", "#e596c8", "#e8cf5a", "#c4c6cc", "#6fd3f5", "#f29a94"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4], [1, 4], [6, 2, 1, 2]];

export function colour(at: number, dark: boolean): string {
  const all = dark ? DARK : LIGHT;
  return all[at % all.length] as string;
}

function dash(at: number): number[] {
  return DASHES[at % DASHES.length] as number[];
}

interface Column {
  curve: number;
  steps: number[];
  values: number[];
  faint: boolean;
}

/** Columns of a curve: its values, drawn faintly behind their mean if there is one. */
function columnsOf(curves: Curve[]): Column[] {
  return curves.flatMap(({ view }, curve) => {
    if (view === undefined) return [{ curve, steps: [], values: [], faint: false }];
    const raw = { curve, steps: view.steps, values: view.values, faint: view.window > 1 };
    return view.window > 1 ? [raw, { curve, steps: view.meanSteps, values: view.means, faint: false }] : [raw];
  });
}

/** Columns on a common axis of steps; curves can have different steps. A logarithmic axis excludes values of 0 and below. */
function aligned(columns: Column[], log: boolean): uPlot.AlignedData {
  const steps = [...new Set(columns.flatMap((column) => column.steps))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, at) => [step, at]));
  const found = columns.map(({ steps: own, values }) => {
    const column = new Array<number | null | undefined>(steps.length).fill(undefined);
    own.forEach((step, at) => {
      const value = values[at] as number;
      column[places.get(step) as number] = log && value <= 0 ? null : value;
    });
    return column;
  });
  return [steps, ...found] as uPlot.AlignedData;
}

/** Lowest and highest value of the axis, with a margin. */
function range(curves: Curve[], scaling: Scaling): [number, number] {
  const views = curves.flatMap(({ view }) => (view && view.steps.length ? [view] : []));
  const every = views.flatMap((view) => (scaling === "robust" ? [view.low, view.high] : [...view.values]));
  const low = every.reduce((least, one) => Math.min(least, one), Infinity);
  const high = every.reduce((most, one) => Math.max(most, one), -Infinity);
  if (!Number.isFinite(low)) return [0, 1];
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function isPositive(curves: Curve[]): boolean {
  return curves.some(({ view }) => view?.steps.length) && curves.every(({ view }) => view === undefined || view.values.every((value) => value > 0));
}

export function Chart({ title, curves, scaling, zoom, height = 220 }: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const [pointed, point] = useState("");
  const plot = useRef<uPlot | null>(null);
  const dark = useDark();
  const known = curves.find(({ view }) => view !== undefined)?.view;
  const unit = known?.unit ?? "value";
  const log = scaling === "log" && isPositive(curves);
  const columns = columnsOf(curves);
  const shape = JSON.stringify([columns.map((one) => [one.curve, one.faint]), curves.map((one) => one.label), dark, unit, log, height]);
  const now = useRef({ curves, scaling, zoom, columns });
  now.current = { curves, scaling, zoom, columns };
  const drawn = notes(curves, scaling, log, unit);
  const note = [curves.length === 1 && known ? known.metric : "", drawn].filter(Boolean).join("; ");
  useEffect(() => {
    const where = place.current as HTMLDivElement;
    const ink = dark ? "#c3c7cf" : "#44474e";
    const axis: uPlot.Axis = {
      stroke: ink,
      grid: { stroke: dark ? "#ffffff1a" : "#0000001a", width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      labelGap: 0,
      labelSize: 18,
    };
    const made = new uPlot(
      {
        width: where.clientWidth || 300,
        height,
        legend: { show: false },
        cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
        scales: {
          x: { time: false },
          y: log ? { distr: 3 } : { range: () => range(now.current.curves, now.current.scaling) },
        },
        axes: [
          { ...axis, size: 26, label: "step" },
          { ...axis, size: (_, marks) => 14 + 7 * Math.max(2, ...(marks ?? []).map((mark) => mark.length)), label: unit, values: (_, marks) => marks.map((mark) => (mark === null ? "" : number(mark))) },
        ],
        series: [{}, ...columns.map((column) => seriesOf(column, curves[column.curve] as Curve, dark))],
        hooks: {
          draw: [(self) => now.current.scaling === "robust" && mark(self, now.current.curves, dark, unit)],
          setCursor: [(self) => point(at(self, now.current.curves, now.current.columns, unit))],
          setSelect: [
            (self) => {
              if (self.select.width < 4) return;
              const [first, last] = [self.select.left, self.select.left + self.select.width].map((x) => self.posToVal(x, "x"));
              self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
              now.current.zoom?.(Math.floor(first as number), Math.ceil(last as number));
            },
          ],
        },
      },
      aligned(columns, log),
      where,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: where.clientWidth, height }));
    watch.observe(where);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(aligned(columns, log)), [curves, scaling]);
  const pressed = (event: KeyboardEvent) => {
    const self = plot.current;
    const last = (self?.data[0].length ?? 0) - 1;
    if (!self || last < 0) return;
    const idx = self.cursor.idx ?? null;
    const moves: Record<string, number> = { ArrowRight: idx === null ? 0 : idx + 1, ArrowLeft: idx === null ? last : idx - 1, Home: 0, End: last };
    const next = moves[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const step = self.data[0][Math.min(last, Math.max(0, next))] as number;
    self.setCursor({ left: self.valToPos(step, "x"), top: self.over.clientHeight / 2 });
  };
  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong>
        {curves.map((curve, index) => (
          <span key={curve.label} class="key">
            {curves.length > 1 && (
              <svg viewBox="0 0 24 8" aria-hidden="true">
                <line x1="0" x2="24" y1="4" y2="4" stroke={colour(index, dark)} stroke-width="3" stroke-dasharray={dash(index).join(" ")} />
              </svg>
            )}
            {curves.length > 1 ? `${curve.label} ` : ""}
            <span class="now">{newest(curve, unit)}</span>
          </span>
        ))}
      </figcaption>
      <div
        ref={place}
        role="img"
        tabIndex={0}
        onKeyDown={pressed}
        onBlur={() => plot.current?.setCursor({ left: -10, top: -10 })}
        aria-label={`${title} over steps, in ${unit}. ${[...curves.map((curve) => summary(curve, unit)), drawn].filter(Boolean).join("; ")}`}
      />
      <p class="readout" role="status">
        {pointed || note}
      </p>
    </figure>
  );
}

function seriesOf(column: Column, { view, sparse }: Curve, dark: boolean): uPlot.Series {
  const stroke = colour(column.curve, dark);
  const few = sparse === true || (view?.steps.length ?? 0) <= 40;
  return {
    stroke: column.faint ? `${stroke}48` : stroke,
    width: column.faint ? 1 : 2,
    dash: column.faint ? undefined : dash(column.curve),
    spanGaps: true,
    points: { show: !column.faint && few && (view?.window ?? 1) === 1, size: sparse ? 7 : 5, fill: stroke },
  };
}

/** A triangle at the edge for each value outside of the axis, with the largest value as text. */
function mark(self: uPlot, curves: Curve[], dark: boolean, unit: string): void {
  const { ctx, bbox } = self;
  const size = 5 * devicePixelRatio;
  const [first, last] = [self.scales.x?.min ?? -Infinity, self.scales.x?.max ?? Infinity];
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  curves.forEach(({ view }, curve) => {
    if (!view) return;
    const seen = view.marks.filter(({ step }) => step >= first && step <= last);
    const [, high] = range(curves, "robust");
    const largest = seen.reduce((most, one) => Math.max(most, one.value), -Infinity);
    ctx.fillStyle = colour(curve, dark);
    for (const { step, value } of seen) {
      const x = self.valToPos(step, "x", true);
      const above = value > high || value >= view.high;
      const [tip, base] = above ? [bbox.top, bbox.top + 1.6 * size] : [bbox.top + bbox.height, bbox.top + bbox.height - 1.6 * size];
      ctx.beginPath();
      ctx.moveTo(x, tip);
      ctx.lineTo(x - size, base);
      ctx.lineTo(x + size, base);
      ctx.fill();
      if (above && value === largest && curves.length === 1) {
        const right = x > bbox.left + bbox.width / 2;
        ctx.textAlign = right ? "right" : "left";
        ctx.fillText(`${inUnit(value, unit)}, step ${number(step)}`, x + (right ? -1 : 1) * (size + 3 * devicePixelRatio), bbox.top + 1);
      }
    }
  });
  ctx.restore();
}

/** Values at the cursor, as text. */
function at(self: uPlot, curves: Curve[], columns: Column[], unit: string): string {
  const { idx, left } = self.cursor;
  if (idx === null || idx === undefined || left === undefined || left < 0) return "";
  const step = self.data[0][idx] as number;
  const parts = curves.flatMap(({ label, view }, curve) => {
    const values = columns.flatMap((column, place) => {
      const value = self.data[place + 1]?.[idx];
      return column.curve !== curve || value === undefined || value === null ? [] : [`${!column.faint && (view?.window ?? 1) > 1 ? "mean " : ""}${inUnit(value, unit)}`];
    });
    return values.length ? [`${curves.length > 1 ? `${label} ` : ""}${values.join(", ")}`] : [];
  });
  return parts.length ? `Step ${number(step)}: ${parts.join("; ")}` : "";
}

function newest({ view }: Curve, unit: string): string {
  if (!view?.steps.length) return "not measured";
  const value = view.window > 1 ? view.means.at(-1) : view.values.at(-1);
  return inUnit(value, unit);
}

function summary({ label, view }: Curve, unit: string): string {
  if (!view?.steps.length) return `${label}: not measured`;
  const low = view.values.reduce((least, one) => Math.min(least, one), Infinity);
  const high = view.values.reduce((most, one) => Math.max(most, one), -Infinity);
  return `${label}: ${inUnit(view.values.at(-1), unit)} at step ${view.steps.at(-1)}, from ${number(low)} to ${number(high)}`;
}

/** Notes about smoothing, outliers and scaling. */
function notes(curves: Curve[], scaling: Scaling, log: boolean, unit: string): string {
  const views = curves.flatMap(({ view }) => (view ? [view] : []));
  const windows = [...new Set(views.filter((view) => view.window > 1).map((view) => view.window))];
  const found = windows.length ? [`mean of ${windows.join(" or ")} steps`] : [];
  const outliers = views.reduce((sum, view) => sum + view.outliers, 0);
  if (scaling === "robust" && outliers > 0) {
    const marks = views.flatMap((view) => view.marks);
    const far = marks.reduce((most, one) => (Math.abs(one.value) > Math.abs(most.value) ? one : most));
    found.push(`${outliers === 1 ? "one outlier" : `${number(outliers)} outliers`} outside of the scale: ${outliers === 1 ? "" : "up to "}${inUnit(far.value, unit)} at step ${number(far.step)}`);
  }
  if (scaling === "log" && !log) found.push("linear: some values are 0 or less");
  return found.join("; ");
}
